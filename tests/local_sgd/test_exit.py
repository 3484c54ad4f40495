# SPDX-License-Identifier: Apache-2.0
"""A run that is told to end does so where all workers meet, and leaves a checkpoint of a sync point."""

import pytest

from tests.local_sgd.runs import arguments, local_run
from tests.support.pretrain import run_pretrain


def terminate_rank_one_at_its_second_step():
    """Send rank 1 the signal that a batch system sends, in the middle of an interval."""
    import functools
    import os
    import signal

    if os.environ["RANK"] != "1":
        return
    import megatron.training.training as training

    original = training.train_step

    @functools.wraps(original)
    def train_step(*args, **kwargs):
        if kwargs["iteration"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    training.train_step = train_step


def test_a_signal_ends_all_workers_at_the_next_round_with_a_checkpoint(tmp_path):
    options = {"train_iters": 9, "local_sgd_sync_interval": 4}
    saving = {"exit_signal_handler": True, "save": str(tmp_path), "save_interval": 100}
    ranks = run_pretrain(
        arguments("single", "fp32", workers=2, **saving, **options),
        2,
        before=terminate_rank_one_at_its_second_step,
    )
    assert [len(rank.record.steps) for rank in ranks] == [4, 4]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    resumed = local_run("single", "fp32", workers=2, load=str(tmp_path), **options)
    assert "saved at a sync point (round 1)" in resumed[0].stdout


def let_an_hour_pass_on_rank_one():
    """Make rank 1 believe, at its second step, that the run started an hour ago."""
    import functools
    import os

    if os.environ["RANK"] != "1":
        return
    import megatron.training.training as training

    original = training.train_step

    @functools.wraps(original)
    def train_step(*args, **kwargs):
        if kwargs["iteration"] == 1:
            training._TRAIN_START_TIME -= 3600
        return original(*args, **kwargs)

    training.train_step = train_step


@pytest.mark.parametrize("evaluation", [{}, {"eval_interval": 1, "eval_iters": 1}], ids=["plain", "evaluating"])
def test_a_time_limit_ends_all_workers_at_the_next_round(tmp_path, evaluation):
    ranks = run_pretrain(
        arguments(
            "single",
            "fp32",
            workers=2,
            exit_duration_in_mins=30,
            save=str(tmp_path),
            save_interval=100,
            train_iters=9,
            local_sgd_sync_interval=4,
            **evaluation,
        ),
        2,
        before=let_an_hour_pass_on_rank_one,
    )
    assert [len(rank.record.steps) for rank in ranks] == [4, 4]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
