# SPDX-License-Identifier: Apache-2.0
"""A-EDiT inside Megatron's loop: workers make steps of their own number between two meetings, and are equal after."""

import json
import re

import pytest
import torch

from tests.local_sgd.runs import arguments, local_run, model_digests, same_state, worker_slices
from tests.support.every_run import one_of_each
from tests.support.pretrain import as_worker, run_pretrain
from tests.support.slow_writer import ASYNC, start_writers_at_once

STEPS = [[1, 2], [3, 1], [2, 1], [1, 1]]
"""Of two workers: 12 in all, which are the samples of 6 iterations."""
PENALTY = {
    "local_sgd_skip_anomaly": True,
    "local_sgd_pseudo_gradnorm_reduce": True,
    "local_sgd_clip_pseudo_grad": 10.0,
    "local_sgd_use_step_weight": True,
}


def by_time(tmp_path, steps=STEPS, **others):
    """Return the options of a run that meets after these steps."""
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in steps))
    return {
        "local_sgd_use_async": True,
        "local_sgd_min_total_global_steps": 1,
        "local_sgd_replay_meetings": str(file),
        **others,
    }


def lines(ranks):
    """Return the iteration lines of the log, which the last rank prints."""
    return [line for line in ranks[-1].stdout.splitlines() if re.search(r" iteration +\d+/", line)]


def assert_equal_workers(ranks, layout):
    first, *others = worker_slices(ranks, layout, 2)
    for worker in others:
        assert model_digests(worker) == model_digests(first)


def test_workers_make_their_own_steps_and_are_equal_after_the_round(tmp_path):
    record = tmp_path / "record.jsonl"
    options = by_time(tmp_path, **PENALTY, local_sgd_record_meetings=str(record))
    ranks = local_run("single", "fp32", workers=2, **options)
    assert [len(rank.record.steps) for rank in ranks] == [4, 4]
    assert_equal_workers(ranks, "single")
    assert len(lines(ranks)) == 4
    assert re.search(r"iteration +1/.*consumed samples: +6 \|.*inner steps: 3 \(1 to 2 by worker\)", lines(ranks)[0])
    assert re.search(r"iteration +4/.*consumed samples: +24 \|.*outer round: 4 \|", lines(ranks)[3])
    assert [json.loads(line) for line in record.read_text().splitlines()] == STEPS


def patience_of_workers(model, optimizer, args):
    """Probe: for how many seconds a worker waits for the others."""
    from megatron_ext.seams.process_groups import current_groups

    return current_groups().across._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_a_worker_may_wait_for_the_others_as_long_as_an_interval_lasts(tmp_path):
    options = by_time(tmp_path, local_sgd_sync_time=5000, distributed_timeout_minutes=2)
    ranks = run_pretrain(arguments("single", "fp32", workers=2, **options), 2, probe=patience_of_workers)
    assert [rank.probe for rank in ranks] == [5120, 5120]


def test_a_worker_trains_on_its_own_slices_at_its_own_pace_and_logs_the_mean_of_its_steps(tmp_path):
    ranks = local_run("single", "fp32", workers=2, **by_time(tmp_path, [[1, 3], [2, 2]]), train_iters=4)
    apart = arguments("single", "fp32", workers=None, train_iters=3)
    for worker, steps in enumerate([1, 3]):
        alone = run_pretrain(apart, 1, before=as_worker(worker, 2))[0].losses[:steps]
        assert ranks[worker].losses[0] == pytest.approx(sum(alone) / steps, rel=1e-6)


def test_the_clock_gives_way_to_the_samples_and_the_schedule_follows_all_steps(tmp_path):
    options = {"local_sgd_use_async": True, "local_sgd_sync_time": 600, "lr_decay_style": "linear", "min_lr": 0.0}
    ranks = local_run("single", "fp32", workers=2, **options, train_iters=4, local_sgd_warmup_steps=1)
    assert [len(rank.record.steps) for rank in ranks] == [2, 2]
    assert_equal_workers(ranks, "single")
    assert re.search(r"consumed samples: +16 \|.*learning rate: 0.0+E\+00 \|.*inner steps: 6 ", lines(ranks)[-1])


def test_a_resume_where_workers_differ_repeats_the_run_bit_for_bit(tmp_path):
    # The first meeting makes no round, and the second one does.
    options = by_time(tmp_path, local_sgd_min_total_global_steps=5, save=str(tmp_path / "saved"), save_interval=100)
    through = local_run("single", "bf16-distopt-overlap", workers=2, **options)
    first = local_run("single", "bf16-distopt-overlap", workers=2, **{**options, "exit_interval": 1})
    assert [len(rank.record.steps) for rank in first] == [1, 1]
    assert model_digests(first[:1]) != model_digests(first[1:])
    rest = local_run("single", "bf16-distopt-overlap", workers=2, **options, load=str(tmp_path / "saved"))
    assert [len(rank.record.steps) for rank in rest] == [3, 3]
    assert same_state(rest, through)
    assert lines(rest)[-1].split("consumed")[1].split("|")[0] == lines(through)[-1].split("consumed")[1].split("|")[0]


def test_log_evaluation_and_saves_come_at_the_first_meeting_past_their_sample(tmp_path):
    options = by_time(tmp_path, [[2, 1], [1, 2], [1, 1], [3, 1]], log_interval=2, eval_interval=3, eval_iters=1)
    options |= {"save": str(tmp_path / "saved"), "save_interval": 4, "local_sgd_evaluation": "workers"}
    ranks = local_run("tp2", "fp32", workers=2, **options)
    assert_equal_workers(ranks, "tp2")
    # Global batches after the meetings: 1.5, 3, 4 and 6.
    assert [int(re.search(r"iteration +(\d+)/", line)[1]) for line in lines(ranks)] == [1, 2, 3, 4]
    said = "".join(rank.stdout for rank in ranks)
    assert re.findall(r"validation loss at iteration (\d+) \|", said) == ["2", "4"]
    assert sorted(path.name for path in (tmp_path / "saved").glob("iter_*")) == ["iter_0000003", "iter_0000004"]


@pytest.mark.parametrize("writing", one_of_each([{}, ASYNC], {0}), ids=["in the step", "beside the steps"])
def test_checkpoints_at_multiples_of_the_retain_interval_in_samples_stay(tmp_path, writing):
    # Global batches after the meetings: 2, 3, 4, 5 and 6.
    options = by_time(tmp_path, [[2, 2], [1, 1], [1, 1], [1, 1], [1, 1]], save=str(tmp_path / "saved"), **writing)
    run = arguments("single", "fp32", workers=2, **options, save_interval=1, save_retain_interval=2)
    run_pretrain(run, 2, before=start_writers_at_once)
    assert sorted(path.name for path in (tmp_path / "saved").glob("iter_*")) == [f"iter_000000{n}" for n in (1, 3, 5)]


@pytest.mark.slow
def test_workers_of_tensor_and_pipeline_parallel_ranks_are_equal_after_overlapped_steps(tmp_path):
    ranks = local_run("tp2-pp2", "bf16-distopt-overlap", workers=2, **by_time(tmp_path, **PENALTY))
    assert len(ranks) == 8
    assert [len(rank.record.steps) for rank in ranks] == [4] * 8
    assert_equal_workers(ranks, "tp2-pp2")
