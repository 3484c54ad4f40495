# SPDX-License-Identifier: Apache-2.0
"""The example without Megatron learns, with whole and with sharded workers."""

import re
import runpy
import subprocess
import sys
from functools import partial

import pytest

from tests.support.distributed import REPOSITORY, run_ranks, run_successful_ranks

SCRIPT = str(REPOSITORY / "examples" / "local_sgd" / "train_plain_pytorch.py")


def train(*arguments):
    runpy.run_path(SCRIPT)["main"](["--steps", "60", "--interval", "20", "--batch", "8", *arguments])


@pytest.mark.parametrize(
    ("world", "options", "steps"), [(2, ["--warmup", "20"], [40, 60]), (4, ["--shards", "2"], [20, 40, 60])]
)
def test_the_example_learns_between_rounds(world, options, steps):
    ranks = run_successful_ranks(partial(train, *options), world, timeout=120)
    rounds = re.findall(r"step +(\d+) +round +(\d+) +loss of worker 0 ([\d.]+)", ranks[0].stdout)
    assert [int(step) for step, _, _ in rounds] == steps
    assert 1 < float(rounds[-1][2]) < 3.3  # a guess has 5.5
    assert not any(rank.stdout for rank in ranks[1:])


def test_workers_of_a_size_that_does_not_fit_are_refused():
    exits = run_ranks(train, 2, "--shards", "3", expect_failure=True)
    assert "--shards 3 does not divide the number of processes 2" in exits[0].stderr


def test_a_bad_value_is_one_sentence():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", SCRIPT]
    done = subprocess.run([*command, "--interval", "0"], capture_output=True, text=True)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("megatron-ext: error: ")]
    assert said == ["megatron-ext: error: local SGD: local_sgd_sync_interval is 0; it must be at least 1 step"]
    assert "UserError" not in done.stderr


def test_a_text_must_be_long_enough(tmp_path):
    (tmp_path / "short").write_text("a few words")
    for text in (tmp_path / "short", tmp_path / "none"):
        exits = run_ranks(train, 1, "--text", str(text), expect_failure=True)
        assert f"--text {text} is not a file of more than 65 bytes; give a longer one" in exits[0].stderr
