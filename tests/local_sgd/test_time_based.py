# SPDX-License-Identifier: Apache-2.0
"""A-EDiT: rounds by time, workers at their own speed, weights by steps."""

import time

import pytest
import torch
import torch.distributed as dist

from megatron_ext.local_sgd import LocalSGDConfig, OuterOptimizerConfig
from tests.local_sgd.plain_runs import GUARD, model, train, wrapped
from tests.support.distributed import run_ranks

ASYNC = {"use_async": True, "local_sgd_sync_time": 600.0, "min_total_global_steps": 1}


def averager_over(value, *, total=None, outer=None, groups=(None, None), **fields):
    """Return an averager of one parameter over all ranks."""
    from megatron_ext.local_sgd.plain_torch import OuterOptimPeriodicModelAverager

    across, inside = groups
    averager = OuterOptimPeriodicModelAverager(
        across,
        local_sgd_config=LocalSGDConfig(**{**ASYNC, **fields}),
        outer_optim_config=OuterOptimizerConfig(**(outer or {"outer_optimizer": "none"})),
        shard_group=inside,
        total_global_steps=total,
    )
    averager.attach([("value", value)])
    return averager


def after_unequal_steps(steps, fields):
    """Return the value after a round in which worker i went to 1 + 2 i in `steps[i]` steps."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    value = torch.zeros(1)
    averager = averager_over(value, **fields)
    averager.replay([steps[rank]])
    reports = []
    for _ in range(steps[rank]):
        value += (1 + 2 * rank) / steps[rank]
        reports.append(averager.average_parameters())
    assert reports[:-1] == [None] * (steps[rank] - 1)
    return float(value), reports[-1].worker_steps


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 2.0),
        ({"use_step_weight": True}, 1.5),
        # Softmax of the norms 1 and 3: 0.8808 and 0.1192, half of it; the other half is 6/8 and 2/8.
        (
            {"use_step_weight": True, "pseudo_gradnorm_reduce": True},
            0.5 * 1.5 + 0.5 * (0.880797 * 1 + 0.119203 * 3),
        ),
        (
            {"use_step_weight": True, "pseudo_gradnorm_reduce": True, "step_weight_ratio": 0.0},
            0.880797 * 1 + 0.119203 * 3,
        ),
    ],
    ids=["mean", "by steps", "by both", "by norms"],
)
def test_workers_count_by_their_steps(fields, expected):
    for value, steps in run_ranks(after_unequal_steps, 2, [6, 2], fields):
        assert value == pytest.approx(expected, rel=1e-5)
        assert steps == [6, 2]


def with_too_few_steps():
    """Return the value after every step, with meetings after 2, 4 and 6 steps and a round only from 10 on."""
    dist.init_process_group("gloo")
    value = torch.zeros(1)
    averager = averager_over(value, min_total_global_steps=10)
    averager.replay([2, 4, 6])
    found = []
    for _ in range(6):
        value += dist.get_rank() + 1.0
        averager.average_parameters()
        found.append(float(value))
    return found


def test_without_enough_steps_a_meeting_makes_no_round():
    # 4 and 8 steps together are too few; the third meeting, with 12, makes the workers equal.
    assert run_ranks(with_too_few_steps, 2) == [[1.0, 2.0, 3.0, 4.0, 5.0, 9.0], [2.0, 4.0, 6.0, 8.0, 10.0, 9.0]]


def at_their_own_speed(slow):
    """Train until 60 steps are made together, worker 1 with a pause of `slow` seconds in each."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    value = torch.zeros(3)
    averager = averager_over(value, total=60, local_sgd_sync_time=0.2, outer={})
    while not averager.finished:
        time.sleep(slow if rank else slow / 20)
        value += torch.rand(3, generator=torch.Generator().manual_seed(100 * rank + averager.step))
        averager.average_parameters()
    again = torch.zeros(3)
    replayed = averager_over(again, total=60, local_sgd_sync_time=0.2, outer={})
    replayed.replay(averager.meetings)
    while not replayed.finished:
        again += torch.rand(3, generator=torch.Generator().manual_seed(100 * rank + replayed.step))
        replayed.average_parameters()
    return averager.step, value.tolist(), again.tolist()


def test_a_fast_worker_makes_more_steps_and_the_recorded_meetings_replay_the_run():
    (fast, first, again), (slow, second, also_again) = run_ranks(at_their_own_speed, 2, 0.05)
    assert fast >= 2 * slow
    assert fast + slow >= 60
    assert first == second == again == also_again


def without_more_data():
    """Return the values of two workers of which one stops after 2 steps and waits for the other's 10."""
    dist.init_process_group("gloo")
    value = torch.zeros(1)
    averager = averager_over(value, total=12)
    if dist.get_rank() == 0:
        averager.replay([2, 6, 10])
        while not averager.finished:
            value += 1.0
            averager.average_parameters()
    else:
        averager.replay([2])
        for _ in range(2):
            value += 3.0
            averager.average_parameters()
        averager.wait()
    return averager.step, float(value)


def test_a_worker_without_data_joins_rounds_without_a_weight():
    # The first round is the mean of 2 and 6; to the others the second worker brings nothing, and dilutes nothing.
    assert run_ranks(without_more_data, 2) == [(10, 12.0), (2, 12.0)]


def without_data_anywhere():
    """Return what is said when all workers wait before there were enough steps."""
    from megatron_ext.errors import UserError

    dist.init_process_group("gloo")
    value = torch.zeros(1)
    averager = averager_over(value, total=1000, local_sgd_sync_time=600.0)
    for _ in range(3 + dist.get_rank()):
        averager.average_parameters()
    try:
        averager.wait()
    except UserError as error:
        return str(error)
    return "nothing"


def test_waiting_workers_do_not_wait_for_each_other_forever():
    for said in run_ranks(without_data_anywhere, 2):
        assert "all workers wait, after 7 of the 1000 steps of total_global_steps together: no worker has data" in said


def residuals_of_an_idle_worker():
    """Return what the idle worker's message had lost before and after a round to which it brought nothing."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    value = torch.zeros(64)
    averager = averager_over(value, total=3, codec="int4")
    averager.replay([[1, 2], [1]][rank])
    value += torch.rand(64, generator=torch.Generator().manual_seed(rank))
    averager.average_parameters()
    before = [residual.clone() for residual in averager.engine.worker_state()["residual"]]
    if rank == 0:
        value += 1.0
        averager.average_parameters()
    else:
        averager.wait()
    after = averager.engine.worker_state()["residual"]
    return [residual.tolist() for residual in before], [residual.tolist() for residual in after]


def test_a_worker_that_brings_nothing_keeps_what_its_last_message_lost():
    busy, idle = run_ranks(residuals_of_an_idle_worker, 2)
    assert busy[0] != busy[1]
    assert any(value for residual in idle[0] for value in residual)
    assert idle[0] == idle[1]


def over_shards():
    """Return the values and meetings of 2 workers of 2 ranks whose clocks run apart."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    value = torch.zeros(1)
    averager = averager_over(value, total=16, local_sgd_sync_time=0.05, groups=(across, inside))
    while not averager.finished:
        time.sleep(0.005 * (1 + rank % 2))
        dist.barrier(inside)
        value += 1.0 + rank
        averager.average_parameters()
    return averager.meetings, float(value)


def test_the_ranks_of_a_worker_meet_together():
    results = run_ranks(over_shards, 4)
    assert results[0][0] == results[1][0]
    assert results[2][0] == results[3][0]
    assert results[0][1] == results[2][1]


def module_of(kind, mesh):
    """Return the model of a worker of 2 ranks, as DDP or FSDP2 make one."""
    from torch.distributed.fsdp import fully_shard

    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model(), process_group=mesh["shard"].get_group())
    module = model()
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh["shard"])
    return module


def over_modules(kind, fields):
    """Train workers under DDP or FSDP2, of which one is slow; return steps, meetings and weights, and of a replay."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))
    groups = mesh["worker"].get_group(), mesh["shard"].get_group()
    worker, number = mesh["worker"].get_local_rank(), dist.get_rank()
    found, meetings = [], None
    for _ in range(2):
        module = module_of(kind, mesh)
        inner = torch.optim.Adam(module.parameters(), lr=0.02)
        optimizer = wrapped(inner, module, groups=groups, total=40, **{**ASYNC, "local_sgd_sync_time": 0.2}, **fields)
        averager = optimizer.averager
        if meetings is not None:
            averager.replay(meetings)
        while not averager.finished:
            if meetings is None:
                time.sleep(0.05 if worker else 0.005)
            train(module, optimizer, averager.step + 1, number, start=averager.step)
        meetings = averager.meetings
        weights = [getattr(value, "full_tensor", lambda value=value: value)() for value in module.parameters()]
        found.append((averager.step, meetings, torch.cat([value.detach().flatten() for value in weights]).tolist()))
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("fields", [{}, {"use_step_weight": True, **GUARD}], ids=["plain", "guarded"])
def test_workers_under_ddp_and_fsdp2_go_at_their_own_speed_and_end_equal(kind, fields):
    ranks = run_ranks(over_modules, 4, kind, fields)
    for trained, replayed in ranks:
        assert trained == replayed
    (fast, _, weights), (slow, _, _) = ranks[0][0], ranks[2][0]
    # By how much the one is faster is the machine's business.
    assert fast + slow >= 40
    assert all(rank[0][2] == weights for rank in ranks)


def resumed():
    """Return the values of a straight run and of one that was saved and loaded between two meetings."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def run(saved_at):
        value = torch.zeros(4)
        averager = averager_over(value, outer={}, use_step_weight=True)
        averager.replay([[3, 7, 11], [2, 4, 9]][rank])
        for step in range([11, 9][rank]):
            value += torch.rand(4, generator=torch.Generator().manual_seed(100 * rank + step))
            averager.average_parameters()
            if step + 1 == saved_at:
                state, own = averager.state_dict(), value.clone()
                averager = averager_over(value.zero_(), outer={}, use_step_weight=True)
                value.copy_(own)
                averager.load_state_dict(state)
                averager.replay([[3, 7, 11], [2, 4, 9]][rank])
        return value.tolist(), averager.meetings

    return run(None), run([5, 3][rank])


def test_a_resume_between_two_meetings_repeats_the_schedule_exactly():
    for straight, other in run_ranks(resumed, 2):
        assert other == straight


def saved_after_meetings():
    """Train by the clock with a save after every second meeting; return how many saves, and both ends."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def steps_from(averager, value, saves):
        while not averager.finished:
            time.sleep(0.03 if rank and saves is not None else 0.003)
            value += torch.rand(3, generator=torch.Generator().manual_seed(100 * rank + averager.step))
            met = len(averager.meetings)
            averager.average_parameters()
            if saves is not None and met < len(averager.meetings) and len(averager.meetings) % 2 == 0:
                saves.append((averager.state_dict(), value.clone()))
        return value.tolist()

    value, saves = torch.zeros(3), []
    averager = averager_over(value, total=200, local_sgd_sync_time=0.05, outer={})
    through = steps_from(averager, value, saves)
    state, at_save = saves[0]
    value = torch.zeros(3)
    resumed = averager_over(value, total=200, local_sgd_sync_time=0.05, outer={})
    value.copy_(at_save)
    resumed.load_state_dict(state)
    resumed.replay(averager.meetings)
    return len(saves), through, steps_from(resumed, value, None)


def test_workers_at_their_own_speed_save_together_after_a_meeting():
    (saves, through, resumed), (others, same, also) = run_ranks(saved_after_meetings, 2)
    assert saves == others >= 1
    assert through == resumed == same == also


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"local_sgd_sync_interval": 4}, "drop --local-sgd-sync-interval"),
        ({"local_sgd_sync_time": 0.0}, "--local-sgd-sync-time is 0.0"),
        ({"min_total_global_steps": 0}, "--local-sgd-min-total-global-steps is 0"),
        ({"use_step_weight": True, "step_weight_ratio": 0.2}, "--local-sgd-step-weight-ratio has no effect"),
        (
            {"use_step_weight": True, "pseudo_gradnorm_reduce": True, "step_weight_ratio": 1.5},
            "--local-sgd-step-weight-ratio is 1.5",
        ),
        ({"use_async": False}, "--local-sgd-min-total-global-steps has no effect without --local-sgd-use-async"),
        ({"gradient_accumulation_steps": 0}, "--local-sgd-gradient-accumulation-steps is 0; it must be at least 1"),
    ],
)
def test_a_bad_value_is_named_by_its_flag(fields, said):
    config = LocalSGDConfig(use_local_sgd=True, local_sgd_workers=2, **{**ASYNC, "local_sgd_sync_time": 5.0, **fields})
    assert any(said in problem for problem in config.problems())
