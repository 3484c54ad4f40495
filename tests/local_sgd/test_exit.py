# SPDX-License-Identifier: Apache-2.0
"""A run that is told to end does so within steps, wherever its workers are, and resumes with the same bits."""

import pytest

from tests.local_sgd.runs import arguments, local_run, same_state
from tests.support.pretrain import run_pretrain
from tests.support.slow_writer import ASYNC, start_writers_at_once
from tests.transport.meter import crossing_calls, install_meter

ITERATIONS = 42
INTERVAL = 40

AHEAD = 20
"""Steps after which the other ranks wait for rank 1 to tell what it was told: it may start much later."""

LIMIT = 6000
"""Minutes, more than a session of tests lasts: a rank's time begins where its process' server imported Megatron."""

ROUNDS = {"train_iters": ITERATIONS, "local_sgd_sync_interval": INTERVAL, "log_interval": 100}


def at_its_second_step(act):
    """Let rank 1 do something at its second step, in the middle of an interval; others do not run far ahead of that."""
    import functools
    import os

    import megatron.training.training as training
    from torch.distributed import distributed_c10d

    original = training.train_step

    @functools.wraps(original)
    def train_step(*args, **kwargs):
        store, iteration = distributed_c10d._get_default_store(), kwargs["iteration"]
        if os.environ["RANK"] != "1":
            if iteration == AHEAD:
                store.wait(["test/rank 1 has told the others"])
        elif iteration == 1:
            act(training)
        elif iteration == 2:
            store.set("test/rank 1 has told the others", "yes")
        return original(*args, **kwargs)

    training.train_step = train_step


def terminate_rank_one():
    """Send rank 1 the signal that a batch system sends."""
    import os
    import signal

    at_its_second_step(lambda training: os.kill(os.getpid(), signal.SIGTERM))


def let_time_pass_on_rank_one():
    """Make rank 1 believe that the run started long ago."""

    def start_earlier(training):
        training._TRAIN_START_TIME -= 2 * 60 * LIMIT

    at_its_second_step(start_earlier)


@pytest.mark.parametrize(
    ("layout", "precision", "tell", "extra"),
    [
        pytest.param("single", "fp32", terminate_rank_one, {}, id="signal"),
        # The writers' checkpoint is whole before the processes end.
        pytest.param(
            "dp2",
            "bf16-distopt",
            terminate_rank_one,
            ASYNC,
            id="signal, saving beside the run",
            marks=pytest.mark.slow,
        ),
        pytest.param("single", "fp32", let_time_pass_on_rank_one, {"exit_duration_in_mins": LIMIT}, id="time limit"),
    ],
)
def test_one_rank_that_is_told_to_end_ends_all_workers_between_rounds_and_a_resume_keeps_the_bits(
    tmp_path, layout, precision, tell, extra
):
    world = 2 if layout == "single" else 4
    saving = {"exit_signal_handler": True, "save": str(tmp_path), "save_interval": 100}
    run = arguments(layout, precision, workers=2, **saving, **{**extra, **ROUNDS})
    ended = run_pretrain(run, world, before=(start_writers_at_once, tell, install_meter), probe=crossing_calls)
    (last,) = {len(rank.record.steps) for rank in ended}
    assert 2 < last <= AHEAD + 1 < INTERVAL
    for rank in ended:  # iteration 0 prints a line; the last one votes and saves
        assert not any(rank.probe[1 : last - 1]), rank.probe
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(last)
    assert f"all workers do so after iteration {last}" in ended[0].stdout
    resumed = local_run(layout, precision, workers=2, load=str(tmp_path), **ROUNDS)
    through = local_run(layout, precision, workers=2, **ROUNDS)
    assert [len(rank.record.steps) for rank in resumed] == [ITERATIONS - last] * world
    assert same_state(resumed, through)


def test_a_run_that_is_told_to_end_right_before_a_round_ends_at_the_round(tmp_path):
    saving = {"exit_signal_handler": True, "save": str(tmp_path), "save_interval": 100}
    options = {"train_iters": 9, "local_sgd_sync_interval": 2}
    run = arguments("single", "fp32", workers=2, **saving, **options)
    ranks = run_pretrain(run, 2, before=terminate_rank_one)
    assert [len(rank.record.steps) for rank in ranks] == [2, 2]
    resumed = local_run("single", "fp32", workers=2, load=str(tmp_path), **options)
    assert "saved at a sync point (round 1)" in resumed[0].stdout


def test_a_time_limit_ends_a_run_that_evaluates_after_every_step(tmp_path):
    options = {"train_iters": 9, "local_sgd_sync_interval": 8, "exit_duration_in_mins": LIMIT}
    saving = {"save": str(tmp_path), "save_interval": 100, "eval_interval": 1, "eval_iters": 1}
    run = arguments("single", "fp32", workers=2, **saving, **options)
    ranks = run_pretrain(run, 2, before=let_time_pass_on_rank_one)
    # Evaluations keep the workers together.
    assert [len(rank.record.steps) for rank in ranks] == [3, 3]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
