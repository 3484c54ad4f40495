# SPDX-License-Identifier: Apache-2.0
"""The parts of meetings in Megatron's loop that need no run."""

import argparse
import pickle

import pytest
import torch

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.meetings.config import MeetingsConfig, read_meetings
from megatron_ext.local_sgd.meetings.counts import MeetingRecorder, data_places
from megatron_ext.local_sgd.meetings.sample_intervals import RetainInterval, SampleIntervals
from megatron_ext.seams.logging import average_layer_metrics
from megatron_ext.seams.samples import RepeatedSamples
from megatron_ext.seams.training import joined_steps


def test_slices_of_workers_have_nothing_in_common_also_where_one_begins_again():
    data = RepeatedSamples(list(range(23)), batch=4)
    assert data.usable == 20

    def read(worker, place, steps):
        return {data[place + step * 4 + worker * 2 + sample] for step in range(steps) for sample in range(2)}

    slow, fast = read(0, 0, 3), read(1, 0, 13)
    assert not slow & fast
    assert fast == {number for number in range(20) if number % 4 >= 2}
    with pytest.raises(UserError, match="the 3 training samples are fewer than --global-batch-size 4"):
        RepeatedSamples([1, 2, 3], batch=4)


def test_a_walk_continues_where_it_was_and_with_other_workers_where_the_furthest_was():
    saved = {"places": [24, 40], "batch": 8}
    assert data_places(None, 2, 8, 16) == [16, 16]
    assert data_places(saved, 2, 8, 32) == [24, 40]
    assert data_places(saved, 3, 8, 32) == [40, 40, 40]
    assert data_places(saved, 2, 16, 32) == [32, 48]


def test_an_interval_is_due_at_the_first_meeting_past_its_multiple():
    args = argparse.Namespace(
        log_interval=3, save_interval=None, save_retain_interval=None, eval_interval=2, exit_interval=0
    )
    intervals = SampleIntervals(args)
    due = []
    for iteration, (before, after) in enumerate([(0, 2), (2, 3), (3, 3), (3, 8)], 1):
        intervals.arm(iteration, before, after)
        due.append([iteration % args.log_interval == 0, iteration % args.eval_interval == 0, intervals.since_line])
    assert due == [[False, True, 1], [True, False, 2], [False, False, 1], [True, True, 2]]
    assert args.save_interval is None and args.exit_interval == 0


def test_the_last_checkpoint_is_saved_once_by_the_loop_or_after_it():
    args = argparse.Namespace(save_interval=4, save_retain_interval=None)
    intervals = SampleIntervals(args)
    # After the loop Megatron saves where the interval that was given does not divide the iterations.
    intervals.arm(4, 4, 6, last=True)
    assert 4 % args.save_interval == 0
    intervals.arm(5, 6, 8, last=True)
    assert 5 % args.save_interval != 0


def test_a_retain_interval_is_the_number_that_was_given_but_where_megatron_asks_which_checkpoint_goes():
    interval = RetainInterval(200)
    interval.passing.add(3)
    assert 3 % interval != 0 and 4 % interval == 0
    assert interval == 200 and interval // 100 == 2 and f"{interval}" == "200"
    assert type(pickle.loads(pickle.dumps(interval))) is int


def test_an_iteration_of_several_steps_has_the_mean_of_those_that_were_made():
    def step(loss, skipped, norm, logit=0):
        return {"lm loss": torch.tensor([loss])}, skipped, False, False, 0, norm, None, logit

    losses, skipped, *rest = joined_steps([step(1.0, 0, 5.0), step(float("nan"), 1, None), step(3.0, 0, 7.0)])
    assert (float(losses["lm loss"]), skipped, rest[3]) == (2.0, 0, 7.0)
    assert joined_steps([step(1.0, 1, None, 4.0), step(2.0, 1, None, 3.0)])[1:] == (1, False, False, 0, None, None, 4.0)


def test_what_layers_add_up_is_averaged_over_the_steps():
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    tracker = get_moe_metrics_tracker()
    tracker.clear()
    for _ in range(3):
        tracker.record("load_balancing_loss", torch.tensor(1.5), layer_number=1, num_layers=2)
    average_layer_metrics(3)
    assert tracker.metrics["load_balancing_loss"].values.tolist() == [1.5, 0.0]
    tracker.clear()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1, 2]\nnonsense\n", r"line 2: 'nonsense' is not a list of the steps"),
        ("[1, 0]\n", r"line 1: '\[1, 0\]' is not a list of the steps"),
        ("[1, 2, 3]\n", r"line 1: 3 workers met, and this run has 2; give that number to --local-sgd-workers"),
    ],
)
def test_a_record_of_something_else_is_refused_by_its_line(tmp_path, content, said):
    file = tmp_path / "steps.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=said):
        read_meetings(str(file), 2)


def test_a_record_is_that_of_the_run_that_continues(tmp_path):
    file = tmp_path / "steps.jsonl"
    MeetingRecorder(str(file), []).write([9, 9])
    MeetingRecorder(str(file), [[1, 2]]).write([3, 4])
    assert read_meetings(str(file), 2) == [[1, 2], [3, 4]]


def test_options_of_meetings_have_no_effect_without_rounds_by_time():
    found = MeetingsConfig(local_sgd_data_slack=2.0).problems(LocalSGDConfig(use_local_sgd=True, local_sgd_workers=2))
    assert found == ["--local-sgd-data-slack has no effect without --local-sgd-use-async; drop it"]
