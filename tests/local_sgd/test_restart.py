# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed: torchrun starts the job again, which resumes by itself."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local_sgd.runs import arguments, local_run
from tests.support.distributed import REPOSITORY
from tests.support.pretrain import run_failing_pretrain

ROUNDS = {"train_iters": 8, "local_sgd_sync_interval": 4}

RANK = """
import functools, json, os, signal, sys
from pathlib import Path

from tests.support.pretrain_rank import pretrain_rank

def die_at_the_sixth_step():
    from megatron.training import training

    original = training.train_step

    @functools.wraps(original)
    def train_step(*args, **kwargs):
        if kwargs["iteration"] == 5 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    training.train_step = train_step

if __name__ == "__main__":
    folder, *options = sys.argv[1:]
    record = pretrain_rank("examples/pretrain_gpt.py", tuple(options), "script", None, (die_at_the_sixth_step,))
    left = {"steps": [step.iteration for step in record.steps], "parameters": record.parameters}
    Path(folder, "rank" + os.environ["RANK"]).write_text(json.dumps(left))
"""


@pytest.mark.slow
def test_torchrun_starts_a_run_with_a_killed_rank_again_and_it_ends_with_the_same_bits(tmp_path):
    script, saved = tmp_path / "rank.py", tmp_path / "saved"
    script.write_text(RANK, encoding="utf-8")
    saving = {"save": str(saved), "load": str(saved), "save_interval": 3}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    options = arguments("single", "fp32", workers=2, **ROUNDS, **saving)
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        # torch 2.13 otherwise keeps the store, with the addresses of the ranks that are gone, over a restart.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    done = subprocess.run(
        [*launch, str(script), str(tmp_path), *options],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The checkpoint is one in the middle of an interval.
    assert "local SGD: resumed after round 0, 3 steps into the interval" in done.stdout
    through = local_run("single", "fp32", workers=2, **ROUNDS)
    for rank in through:
        left = json.loads(Path(tmp_path, f"rank{rank.rank}").read_text(encoding="utf-8"))
        assert left == {"steps": [4, 5, 6, 7, 8], "parameters": rank.parameters}


def kill_rank_one_at_the_third_step():
    import functools

    import megatron.training.training as training

    original = training.train_step

    @functools.wraps(original)
    def train_step(*args, **kwargs):
        if kwargs["iteration"] == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    training.train_step = train_step


def test_ranks_that_lose_one_end_with_one_line():
    run = arguments("single", "fp32", workers=3, **ROUNDS)
    exits = run_failing_pretrain(run, 3, before=kill_rank_one_at_the_third_step)
    errors = "".join(rank.stderr for rank in exits)
    assert errors.count("megatron-ext: error: a rank of this job has ended, or cannot be reached") == 1, errors
    assert "Traceback" not in errors
    assert sorted(rank.exit_code for rank in exits) == [-signal.SIGKILL, 1, 1]
