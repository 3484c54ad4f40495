# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed: torchrun starts the job again, which resumes by itself."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local_sgd.runs import arguments
from tests.support.distributed import REPOSITORY
from tests.support.megatron_checkout import python_path
from tests.support.pretrain import run_failing_pretrain
from tests.support.slow_writer import ASYNC

ROUNDS = {"train_iters": 8, "local_sgd_sync_interval": 4}

RANK = """
import functools, json, os, signal, sys
from pathlib import Path

from tests.support.pretrain_rank import pretrain_rank

def die_at(iteration):
    from megatron.training import training

    original = training.train_step

    @functools.wraps(original)
    def train_step(*args, **kwargs):
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if kwargs["iteration"] == iteration and os.environ["RANK"] == "1" and is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    training.train_step = train_step

if __name__ == "__main__":
    folder, killed_at, *options = sys.argv[1:]
    before = (functools.partial(die_at, int(killed_at)),)
    record = pretrain_rank("examples/pretrain_gpt.py", tuple(options), "script", None, before)
    left = {"steps": [step.iteration for step in record.steps], "parameters": record.parameters}
    Path(folder, "rank" + os.environ["RANK"]).write_text(json.dumps(left))
"""
NEVER = -1


def run_by_torchrun(folder: Path, killed_at: int, **more: object) -> "subprocess.CompletedProcess[str]":
    """Train two workers by torchrun, and let the second rank be killed the first time that it comes to an iteration."""
    folder.mkdir()
    script, saved = folder / "rank.py", folder / "saved"
    script.write_text(RANK, encoding="utf-8")
    saving = {"save": str(saved), "load": str(saved), "save_interval": 3}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    options = arguments("single", "fp32", workers=2, **ROUNDS, **saving, **more)
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(REPOSITORY),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        # torch 2.13 otherwise keeps the store, with the addresses of the ranks that are gone, over a restart.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return subprocess.run(
        [*launch, str(script), str(folder), str(killed_at), *options],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


def left_by(folder: Path) -> list[dict[str, object]]:
    """Return what each rank says at its end: its steps and digests of its weights."""
    return [json.loads((folder / f"rank{rank}").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.fixture(scope="module")
def through(tmp_path_factory):
    """Return what the ranks of a run that nobody kills leave."""
    folder = tmp_path_factory.mktemp("runs") / "through"
    run = run_by_torchrun(folder, NEVER)
    assert run.returncode == 0, run.stderr
    assert "local SGD: resumed" not in run.stdout
    left = left_by(folder)
    assert all(rank["steps"] == list(range(1, 9)) for rank in left)
    return left


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("writing", [{}, ASYNC], ids=["in the step", "beside the steps"])
def test_torchrun_starts_a_run_with_a_killed_rank_again_and_it_ends_with_the_same_bits(tmp_path, through, writing):
    folder = tmp_path / "killed"
    killed = run_by_torchrun(folder, 5, **writing)
    assert killed.returncode == 0, killed.stderr
    left = left_by(folder)
    firsts = {rank["steps"][0] for rank in left}
    # The checkpoint is one in the middle of an interval; a writer beside the steps may not have finished it.
    assert firsts == {4} or (writing and firsts == {1})
    assert ("local SGD: resumed after round 0, 3 steps into the interval" in killed.stdout) == (firsts == {4})
    for whole, resumed in zip(through, left, strict=True):
        assert resumed["steps"] == whole["steps"][-len(resumed["steps"]) :]
        assert resumed["parameters"] == whole["parameters"]


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
