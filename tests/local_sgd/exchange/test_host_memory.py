# SPDX-License-Identifier: Apache-2.0
"""Anchors and outer states in the host's memory: the same bits, the same objects, and room that is checked before."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.exchange.host_memory import HostMemory, require_room
from tests.local_sgd.engines import engine_of, start_groups
from tests.support.distributed import run_ranks

UNITS = ["layer.0", "layer.1", "layer.2"]


def trained(offload, options, device="cpu", read_on=None):
    """Return values and state after rounds, a save, and more rounds from it; and how often something visited."""
    visits = []
    visit = HostMemory.visit
    HostMemory.visit = lambda self, tensors, **more: (visits.append(len(tensors)), visit(self, tensors, **more))[1]
    groups = start_groups()
    seed = torch.Generator().manual_seed(0)
    values = [torch.randn(1000, generator=seed).to(device) for _ in UNITS]
    options = {**options, "penalty": {"cpu_offload": offload, **options.get("penalty", {})}}
    first, second = (engine_of(values, units=UNITS, groups=groups, **options) for _ in range(2))
    first.take_anchor()
    three_steps(first)
    saved = [
        {name: [tensor.to(read_on) for tensor in tensors] for name, tensors in state.items()} if read_on else state
        for state in (first.tensor_state(), first.worker_state())
    ]
    second.load(saved[0], own=saved[1], scalars=first.scalar_state())
    three_steps(second)
    kept = {**second.tensor_state(), **second.worker_state()}
    return (
        [value.tolist() for value in values],
        {name: [t.tolist() for t in state] for name, state in kept.items()},
        visits,
    )


def three_steps(engine):
    """Move every worker elsewhere, with the rounds that are due."""
    noise = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        for value in engine.values:
            value += torch.randn(value.shape, generator=noise).to(value.device)
        if engine.count_step():
            engine.advance()


KINDS = {
    "plain mean": {},
    "adam": {"outer_optimizer": "adam", "outer_optimizer_lr": 0.1},
    "penalty": {"penalty": {"pseudo_gradnorm_reduce": True, "clip_pseudo_grad": 1.0}, "gta": {"reducer": "linear"}},
    "codec": {"penalty": {"codec": "int8"}},
    "fragments": {"streaming": {"fragments": 3, "sync_delay": 1}, "interval": 3},
    "eager": {"streaming": {"eager": True}},
    "pairs": {"gta": {"reducer": "pairwise"}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_offloading_changes_no_bit_of_rounds_and_checkpoints(kind):
    for plain, offloaded in zip(
        *(run_ranks(trained, 2, offload, KINDS[kind]) for offload in (False, True)), strict=True
    ):
        assert offloaded[:2] == plain[:2]
        assert offloaded[2] and not plain[2]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_offloading_from_a_gpu_changes_no_bit(kind):
    for plain, offloaded in zip(
        *(run_ranks(trained, 1, offload, KINDS[kind], "cuda") for offload in (False, True)), strict=True
    ):
        assert offloaded[:2] == plain[:2]


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_was_read_on_the_host_resumes_on_the_gpu(kind, offload):
    (taken,) = run_ranks(trained, 1, offload, KINDS[kind], "cuda")
    (read,) = run_ranks(trained, 1, offload, KINDS[kind], "cuda", "cpu")
    assert read[:2] == taken[:2]


@pytest.mark.gpu
def test_a_round_takes_the_device_memory_of_one_unit_not_of_the_model():
    ((offloaded, plain),) = run_ranks(peak_memory, 1)
    # Values of 16 x 4 MiB: anchor and momentum are twice that on the device, or two units' of them visit. A unit's
    # pseudo-gradients take another two.
    assert plain > 100 * 2**20
    assert offloaded < 25 * 2**20


def peak_memory():
    """Return the device memory that anchors and rounds take beside the values, offloaded and not."""
    groups = start_groups()
    units = [f"layer.{index}" for index in range(16)]
    values = [torch.randn(2**20, device="cuda") for _ in units]
    values[0].dot(values[0])  # cuBLAS takes some memory for itself, once
    found = []
    for offload in (True, False):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine = engine_of(values, units=units, groups=groups, penalty={"cpu_offload": offload})
        engine.take_anchor()
        three_steps(engine)
        found.append(torch.cuda.max_memory_allocated() - before)
    return found


def test_a_visitor_stays_the_same_object_and_brings_home_only_what_changed():
    host = HostMemory(torch.device("cpu"))
    anchor, momentum = host.keep(torch.ones(3)), host.keep(torch.zeros(3))
    homes = [anchor.data_ptr(), momentum.data_ptr()]
    for changed, expected in ((False, 1.0), (True, 2.0)):
        with host.visit([anchor, momentum], changed=changed):
            assert anchor.data_ptr() not in homes
            anchor += 1
        assert anchor.tolist() == [expected] * 3
        assert [anchor.data_ptr(), momentum.data_ptr()] == homes


def test_tensors_come_home_from_a_step_that_failed():
    host = HostMemory(torch.device("cpu"))
    anchor = host.keep(torch.ones(3))
    home = anchor.data_ptr()
    with pytest.raises(RuntimeError), host.visit([anchor], changed=False):
        raise RuntimeError
    assert anchor.data_ptr() == home


def test_state_that_comes_into_being_in_a_step_finds_a_home():
    host = HostMemory(torch.device("cpu"))
    anchor, state = host.keep(torch.ones(3)), torch.full((3,), 5.0)
    before = state.data_ptr()
    with host.visit([anchor], changed=True, new=lambda: [state]):
        pass
    assert state.data_ptr() != before and state.tolist() == [5.0] * 3


def test_too_little_memory_is_told_before_training():
    require_room(10 * 2**30, available=40 * 2**30, processes=4)
    with pytest.raises(UserError) as refused:
        require_room(10 * 2**30 + 1, available=40 * 2**30, processes=4)
    assert "of 4 processes take 40.00 GiB of memory, and 40.00 GiB are free; drop" in str(refused.value)


def without_room():
    """Prepare rounds on a machine that has next to no memory left."""
    import types

    import psutil

    groups = start_groups()
    psutil.virtual_memory = lambda: types.SimpleNamespace(available=1000)
    engine_of([torch.zeros(1000)], groups=groups, penalty={"cpu_offload": True})


def test_a_run_without_room_on_the_host_ends_before_training():
    for rank in run_ranks(without_room, 2, expect_failure=True):
        assert "--local-sgd-cpu-offload: anchor and outer state of" in rank.stderr
