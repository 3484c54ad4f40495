# SPDX-License-Identifier: Apache-2.0
"""Workers that meet by time and are told to end meet at once, however long their interval is."""

import re
from functools import partial
from pathlib import Path

import pytest

from tests.local_sgd.meetings.test_meeting_runs import by_time, lines
from tests.local_sgd.runs import arguments, local_run, same_state, worker_slices
from tests.support.pretrain import run_failing_pretrain, run_pretrain

LIMIT = 6000
"""Minutes, more than a session of tests lasts: a rank's time begins where its process' server imported Megatron."""

STEPS = 4000
"""Of which toy workers make far fewer before they are told."""


def tell_rank(rank, by_signal):
    """Tell a rank to end during its third inner step, by the signal of a batch system or by its time limit."""
    import functools
    import os
    import signal

    import megatron.training.training as training

    original = training.train_step
    calls = []

    @functools.wraps(original)
    def train_step(*args, **kwargs):
        calls.append(None)
        if len(calls) == 3 and os.environ["RANK"] == str(rank):
            if by_signal:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                training._TRAIN_START_TIME -= 2 * 60 * LIMIT
        return original(*args, **kwargs)

    training.train_step = train_step


@pytest.mark.parametrize(
    ("layout", "by_signal", "extra"),
    [
        pytest.param("single", True, {"exit_signal_handler": True}, id="signal"),
        # Rank 3 is not the one that decides for its worker.
        pytest.param("tp2", False, {"exit_duration_in_mins": LIMIT}, id="time limit"),
    ],
)
def test_one_rank_that_is_told_to_end_ends_the_interval_of_all_workers(tmp_path, layout, by_signal, extra):
    world = 2 if layout == "single" else 4
    options = {"local_sgd_use_async": True, "local_sgd_sync_time": 600, "train_iters": STEPS, "lr_decay_iters": STEPS}
    options |= {"local_sgd_min_total_global_steps": 100000, "save": str(tmp_path), "save_interval": STEPS}
    run = arguments(layout, "fp32", workers=2, **options, **extra)
    ended = run_pretrain(run, world, before=partial(tell_rank, world - 1, by_signal))
    assert [len(rank.record.steps) for rank in ended] == [1] * world
    said = "".join(rank.stdout for rank in ended)
    made, most = map(int, re.search(r"inner steps: (\d+) \(\d+ to (\d+) by worker\)", said).groups())
    assert 3 <= most <= made < STEPS
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    # No round was made; each worker continues with its own weights and its own place.
    again = options | {"train_iters": (made + 4) // 2, "local_sgd_min_total_global_steps": 1, "load": str(tmp_path)}
    resumed = local_run(layout, "fp32", workers=2, **again, override_opt_param_scheduler=True)
    assert len(worker_slices(resumed, layout, 2)) == 2
    assert resumed[0].record.steps[0].iteration == 2


def test_a_replay_meets_where_its_record_says_also_when_it_is_told_to_end(tmp_path):
    options = by_time(tmp_path, [[4, 3], [2, 2]], exit_signal_handler=True, save=str(tmp_path / "saved"))
    run = arguments("single", "fp32", workers=2, **options, save_interval=100)
    ended = run_pretrain(run, 2, before=partial(tell_rank, 1, True))
    assert "inner steps: 7 (3 to 4 by worker)" in "".join(rank.stdout for rank in ended)
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_a_run_that_has_ended_is_extended_and_ends_as_one_that_was_longer_from_the_start(tmp_path: Path):
    # 12 steps of both workers are the samples of 6 iterations, 18 those of 9.
    options = by_time(tmp_path, [[1, 3], [4, 1], [2, 1], [1, 2], [1, 2]])
    folder = str(tmp_path / "saved")
    through = local_run("single", "fp32", workers=2, **options, train_iters=9)
    first = local_run("single", "fp32", workers=2, **options, train_iters=6, save=folder, save_interval=100)
    assert re.search(r"iteration +3/.*consumed samples: +24 ", lines(first)[-1])
    longer = {**options, "train_iters": 9, "load": folder}
    exits = run_failing_pretrain(arguments("single", "fp32", workers=2, **longer), 2)
    errors = "".join(rank.stderr for rank in exits)
    assert "schedule of learning rate and weight decay: 24 samples in the run that saved it, 36 samples in" in errors
    assert "--override-opt_param-scheduler" in errors
    assert "Traceback" not in errors
    extended = local_run("single", "fp32", workers=2, **longer, override_opt_param_scheduler=True)
    assert [step.iteration for step in extended[0].record.steps] == [4, 5]
    assert re.search(r"iteration +5/.*consumed samples: +36 ", lines(extended)[-1])
    assert same_state(extended, through)
