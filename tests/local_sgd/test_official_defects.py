# SPDX-License-Identifier: Apache-2.0
"""Defects of EDiT's official implementation that ours does not have, where no other test shows it.

W2   the anchor is taken after the first step and not again when warm-up ends
W4   a wall clock in fp32, whose grid is 128 seconds
W12  saving a state, or meeting twice, applies the outer momentum again
W14  parameters are paired with anchors by position among those that have a gradient
W18  a message for every tensor, a decision on the host for every layer
W19  shards saved under another rank's number; a root that must own parameters (of that, test_plain_torch)

Shown elsewhere:

W1   gradients that stay synchronous, or are never synchronised      test_warmup, test_workers_apart
W3   a detector that learns from what it rejected                    test_guarded_rounds
W5   sparse rounds that synchronise nothing                          test_guarded_rounds
W6   native training without an outer optimizer                      test_rounds
W7   gradients divided by all workers                                test_workers_apart
W8   verdicts and weights that differ between ranks of a worker      test_guarded_rounds, test_rounds
W9   a skipped fp16 step that takes workers out of step              test_rounds, test_plain_torch
W10  ranks of an expert-parallel group as workers                    test_workers_apart, test_rounds
W11  traffic in every step; no distributed optimizer                 test_workers_apart
W13  a learning rate that is frozen after a load                     test_plain_torch
W15  NaN that is accepted                                            test_guarded_rounds
W16  excluded workers that dilute the mean                           test_guarded_rounds
W17  weights that depend on a layer's size                           test_penalty
W20  timers that look at all ranks                                   test_logging, test_workers_apart
"""

import pytest
import torch
import torch.distributed as dist

from megatron_ext.local_sgd import LocalSGDConfig
from tests.local_sgd.engines import engine_of
from tests.local_sgd.plain_runs import model, train, wrapped
from tests.support.distributed import run_ranks


class OneStepForward(torch.optim.Optimizer):
    """Adds to every parameter that has a gradient, in warm-up 1 and later this worker's number + 1."""

    def __init__(self, parameters, warmup):
        super().__init__(parameters, {})
        self.warmup, self.steps = warmup, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        progress = 1.0 if self.steps <= self.warmup else dist.get_rank() + 1.0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter += progress


def forward(steps, warmup, clip=None):
    """Return a value after steps of 1 in warm-up, then of 1 and 2 on the two workers, with a round every 4."""
    dist.init_process_group("gloo")
    value = torch.nn.Parameter(torch.zeros(1))
    value.grad = torch.zeros(1)
    outer = {"outer_optimizer_momentum": 0.0}
    inner = OneStepForward([value], warmup)
    optimizer = wrapped(inner, interval=4, warmup=warmup, outer=outer, clip_pseudo_grad=clip)
    for _ in range(steps):
        optimizer.step()
    return float(value)


@pytest.mark.parametrize(
    ("warmup", "clip", "expected"),
    [
        # The mean progress of an interval is 6; the official value falls below that of the end of warm-up.
        (6, None, 6 + 0.7 * 6),
        (6, 1.0, 6 + 0.7 * 1),
        (0, None, 0.7 * 6),
    ],
)
def test_w2_the_first_pseudo_gradient_is_that_of_one_interval(warmup, clip, expected):
    assert run_ranks(forward, 2, warmup + 4, warmup, clip) == [pytest.approx(expected, rel=1e-5)] * 2


def over_at_a_late_hour():
    """Return when a window of 0.75 seconds is over by a clock that shows seconds since 1970 in steps of 0.25."""
    from megatron_ext.local_sgd.time_based import AsyncSchedule

    dist.init_process_group("gloo")
    seconds = [1795239321.06 + 0.25 * tick for tick in range(5)]
    schedule = AsyncSchedule(
        LocalSGDConfig(use_async=True, local_sgd_sync_time=0.75),
        total_steps=None,
        across=dist.group.WORLD,
        inside=dist.group.WORLD,
        device=torch.device("cpu"),
        clock=lambda: seconds.pop(0),
    )
    schedule.start(0)
    return [schedule.is_over(step) for step in (1, 2, 3, 4)]


def test_w4_windows_of_less_than_a_second_end_in_time():
    assert run_ranks(over_at_a_late_hour, 1) == [[False, False, True, True]]


def asked_again_and_again():
    """Return values of a run, and of one whose state is taken three times at every step."""
    dist.init_process_group("gloo")
    found = []
    for times in (0, 3):
        value = torch.nn.Parameter(torch.zeros(1))
        value.grad = torch.zeros(1)
        optimizer = wrapped(OneStepForward([value], 0), interval=2)
        for _ in range(7):
            optimizer.step()
            for _ in range(times):
                optimizer.state_dict()
                optimizer.averager.engine.gather_anchor()
        found.append(float(value))
    return found


def test_w12_asking_for_the_state_moves_nothing():
    for plain, asked in run_ranks(asked_again_and_again, 2):
        assert plain == asked


def without_some_gradients():
    """Return three values of which the first never has a gradient on worker 1, and the last on neither."""
    dist.init_process_group("gloo")
    values = [torch.nn.Parameter(torch.full((2,), float(number))) for number in range(3)]
    for number, value in enumerate(values):
        if number == 1 or (number == 0 and dist.get_rank() == 0):
            value.grad = torch.zeros(2)
    optimizer = wrapped(OneStepForward(values, 0), interval=2, outer={"outer_optimizer": "none"})
    for _ in range(2):
        optimizer.step()
    return [value.tolist() for value in values]


def test_w14_parameters_without_a_gradient_keep_their_anchors():
    # Worker 0 moves the first by 2, worker 1 does not; they move the second by 2 and by 4.
    assert run_ranks(without_some_gradients, 2) == [[[1.0, 1.0], [4.0, 4.0], [2.0, 2.0]]] * 2


def calls_of_a_guarded_round(units, tensors):
    """Return how often a round of this many units and tensors sends and reduces."""
    from megatron_ext.patching import PatchRegistry
    from megatron_ext.transport.traffic import TrafficMeter

    values = [torch.zeros(100) for _ in range(units * tensors)]
    names = [f"layer.{index // tensors}" for index in range(len(values))]
    engine = engine_of(values, units=names, penalty={"skip_anomaly": True, "clip_pseudo_grad": 1.0})
    engine.take_anchor()
    meter = TrafficMeter(worker_of=range(dist.get_world_size()))
    registry = PatchRegistry()
    registry.apply(meter.patches())
    engine.sync()
    registry.revert()
    return {name: traffic.calls for name, traffic in meter.crossing.items()}


def test_w18_a_round_decides_once_and_packs_what_is_small():
    (few, _), (many, _), (deep, _) = (
        run_ranks(calls_of_a_guarded_round, 2, *shape) for shape in ((2, 1), (2, 50), (20, 1))
    )
    assert many == few
    assert deep["isend"] == 10 * few["isend"]
    assert {name: calls for name, calls in deep.items() if name not in ("isend", "irecv")} == {
        name: calls for name, calls in few.items() if name not in ("isend", "irecv")
    }


def saved_on_scattered_ranks(folder):
    """Return a shard's values of a straight run and of one that loads its state; ranks 0 and 2 are a worker."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from megatron_ext.local_sgd.plain_torch import load_local_sgd_state_dict, save_local_sgd_state_dict

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "worker"))
    groups = mesh["worker"].get_group(), mesh["shard"].get_group()

    def build():
        module = fully_shard(model(), mesh=mesh["shard"])
        inner = torch.optim.SGD(module.parameters(), lr=0.1)
        return module, wrapped(inner, module, interval=2, groups=groups)

    def shards(module):
        return [value.to_local().detach().clone() for value in module.parameters()]

    worker = mesh["worker"].get_local_rank()
    (module, optimizer), (other, fresh) = build(), build()
    train(module, optimizer, 5, worker)
    save_local_sgd_state_dict(optimizer, folder)
    with torch.no_grad():
        for value, saved in zip(other.parameters(), shards(module), strict=True):
            value.to_local().copy_(saved)
    load_local_sgd_state_dict(fresh, folder)
    train(module, optimizer, 8, worker, start=5)
    train(other, fresh, 8, worker, start=5)
    return [[value.tolist() for value in shards(found)] for found in (module, other)]


def test_w19_every_rank_finds_its_own_shard_again(tmp_path):
    results = run_ranks(saved_on_scattered_ranks, 4, str(tmp_path))
    assert all(straight == loaded for straight, loaded in results)
    assert results[0][0] != results[2][0]
