# SPDX-License-Identifier: Apache-2.0
"""How an error that the user can put right is reported by a job of several processes."""

import subprocess
import sys
import time

import pytest

from megatron_ext.errors import combine
from tests.support.distributed import REPOSITORY, run_ranks

SCRIPT = """
import os, sys, time
sys.path.insert(0, {root!r})
from megatron_ext.errors import UserError, report
if os.environ["RANK"] in {failing}:
    report(UserError("--flag is wrong"))
    sys.exit(2)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("failing", "said"),
    [("01", "megatron-ext: error: --flag is wrong"), ("1", "megatron-ext: error on rank 1: --flag is wrong")],
    ids=["everywhere", "on one rank"],
)
def test_an_error_is_said_once_wherever_it_happens(tmp_path, failing, said):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(REPOSITORY), failing=tuple(failing)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if "megatron-ext" in line] == [said]


def test_all_problems_are_listed_under_one_heading():
    assert str(combine(["--a is wrong"], "arguments")) == "arguments: --a is wrong"
    assert str(combine(["a", "b"], "arguments")).splitlines() == ["arguments: 2 problems", "  1. a", "  2. b"]
    assert str(combine(["a", "a"], "arguments")) == "arguments: a"


def failing_ranks(failing):
    """Raise an error of the user's on some ranks while the others wait for them."""
    import torch.distributed as dist

    from megatron_ext.errors import UserError, in_one_line

    sys.excepthook = in_one_line(sys.excepthook)
    dist.init_process_group("gloo")
    if dist.get_rank() in failing:
        raise UserError("--flag is wrong")
    time.sleep(4)
    raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("failing", [(0, 1), (1,), (0,)], ids=str)
def test_ranks_that_know_each_other_say_an_error_once_and_show_no_traceback(failing):
    exits = run_ranks(failing_ranks, 2, failing, expect_failure=True, failure_grace=8.0)
    assert all(rank.exit_code != 0 for rank in exits)
    said = {number: rank.stderr for number, rank in enumerate(exits)}
    assert [number for number in said if "megatron-ext: error: --flag is wrong" in said[number]] == [failing[0]]
    assert not any("Traceback" in text for text in said.values())
    assert all("a rank ends after the error above" in said[number] for number in said if number not in failing)
