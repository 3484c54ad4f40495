# SPDX-License-Identifier: Apache-2.0
"""What a run cannot begin with is one line: states of other optimizers, and checkpoints that are not there."""

import os
from pathlib import Path

import pytest

from tests.local_sgd.runs import arguments
from tests.support.pretrain import run_failing_pretrain, run_pretrain

ROUNDS = {"local_sgd_sync_interval": 1}
BATCH = {"global_batch_size": 4}


def saved(folder: Path, layout: str, precision: str, workers: int | None) -> dict:
    """Save two iterations of a run; return the options of one that resumes."""
    rounds = ROUNDS if workers else {}
    saving = {"save": str(folder), "save_interval": 1, "train_iters": 2, **BATCH, **rounds}
    run_pretrain(arguments(layout, precision, workers=workers, **saving), 2)
    return {**BATCH, **ROUNDS, "load": str(folder), "train_iters": 3, "override_opt_param_scheduler": True}


def refusal(precision: str, **options) -> str:
    """Return what two workers of a rank each say, in one line, of a checkpoint that they cannot load."""
    exits = run_failing_pretrain(arguments("single", precision, workers=2, **options), 2)
    said = exits[0].stderr
    assert "Traceback" not in said and all(rank.exit_code != 0 for rank in exits)
    return said


def assert_the_weights_alone_load(resuming: dict) -> None:
    fresh = run_pretrain(arguments("single", "fp32-distopt", workers=2, no_load_optim=True, **resuming), 2)
    assert len(fresh[-1].losses) == 1


def test_a_stock_checkpoint_of_another_layout_is_refused_as_one_of_workers_is(tmp_path: Path):
    resuming = saved(tmp_path, "tp2-sp", "fp32-distopt", None)
    said = refusal("fp32-distopt", **resuming)
    assert "saved with --tensor-model-parallel-size 2, this run has 1" in said
    assert "--dist-ckpt-optim-fully-reshardable, or start the optimizers fresh with --no-load-optim" in said
    assert_the_weights_alone_load(resuming)


@pytest.mark.parametrize("workers", [None, 2])
def test_a_state_that_was_whole_is_refused_by_the_distributed_optimizer(tmp_path: Path, workers: int | None):
    resuming = saved(tmp_path, "single", "fp32", workers)
    said = refusal("fp32-distopt", **resuming)
    assert "saved with --optimizer adam without --use-distributed-optimizer, this run has --optimizer adam --u" in said
    assert "or take the weights alone with --no-load-optim" in said
    assert_the_weights_alone_load(resuming)


def test_an_iteration_that_is_not_there_is_named_with_those_that_are(tmp_path: Path):
    resuming = saved(tmp_path, "single", "fp32", 2)
    said = refusal("fp32", **resuming, ckpt_step=99)
    assert f"--ckpt-step 99: {os.fspath(tmp_path)} has no such iteration; it has 1, 2" in said


def test_a_folder_to_begin_with_that_has_no_checkpoint_is_named(tmp_path: Path):
    said = refusal("fp32", **BATCH, **ROUNDS, load=str(tmp_path / "own"), pretrained_checkpoint=str(tmp_path))
    assert f"--pretrained-checkpoint {tmp_path}: there is no checkpoint in it" in said
    assert f"nor in --load {tmp_path / 'own'}; give the folder of one, or drop it" in said
