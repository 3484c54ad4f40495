# SPDX-License-Identifier: Apache-2.0
"""The residuals that a peer keeps after a round, in memory that is used again."""

import torch

from megatron_ext.sync_service.peer.outgoing import Outgoing
from megatron_ext.sync_service.peer.parts import Part
from megatron_ext.sync_service.protocol.catalog import TensorSpec
from megatron_ext.sync_service.protocol.frames import whole_box

SPECS = [TensorSpec(name=name, shape=(300,), unit=f"layer.{name}") for name in "ab"]
PARTS = [Part(key=spec.name, spec=spec, box=whole_box(spec.shape), is_primary=True) for spec in SPECS]


def started() -> Outgoing:
    outgoing = Outgoing(PARTS, "int4", 512)
    outgoing.continue_from({name: torch.zeros(300) for name in "ab"})
    return outgoing


def contribute(outgoing: Outgoing, number: int, excluded: tuple[str, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(number)
    values = {name: torch.randn(300, generator=generator) for name in "ab"}
    outgoing.begin(number, 0)
    for job in outgoing.jobs(number, 0, 1024):
        assert list(outgoing.batches(number, job, values))
    outgoing.keep_residuals(outgoing.settle(number, 0, values), excluded)


def residuals_of(outgoing: Outgoing) -> dict[str, torch.Tensor]:
    return {name: residual.clone() for name, residual in outgoing.residuals.items()}


def test_residuals_of_what_a_round_left_out_stay_as_before():
    outgoing, other = started(), started()
    for number in range(1, 4):
        contribute(outgoing, number)
        contribute(other, number)
    before = residuals_of(outgoing)
    contribute(outgoing, 4, excluded=("layer.a",))
    contribute(other, 4)
    after = residuals_of(outgoing)
    assert torch.equal(after["a"], before["a"]) and before["a"].any()
    assert torch.equal(after["b"], residuals_of(other)["b"]) and not torch.equal(after["b"], before["b"])
    # The memory of the one is not that of the next contribution.
    contribute(outgoing, 5, excluded=("layer.a",))
    assert torch.equal(residuals_of(outgoing)["a"], before["a"])


def test_a_call_that_was_given_up_changes_no_residual():
    outgoing = started()
    contribute(outgoing, 1)
    values = {name: torch.ones(300) for name in "ab"}
    outgoing.begin(2, 0)
    (late, *_) = outgoing.jobs(2, 0, 1 << 20)
    frames = outgoing.batches(2, late, values)
    next(frames)
    outgoing.keep_residuals(outgoing.settle(2, 0, values))
    before = residuals_of(outgoing)
    values["a"].fill_(7.0)
    list(frames)
    assert all(torch.equal(residual, before[name]) for name, residual in residuals_of(outgoing).items())


def test_residuals_that_an_earlier_process_has_brought_are_dropped_except_where_that_was_left_out():
    outgoing = started()
    contribute(outgoing, 1)
    before = residuals_of(outgoing)
    outgoing.drop_residuals(excluded=("layer.a",))
    assert residuals_of(outgoing).keys() == {"a"} and torch.equal(residuals_of(outgoing)["a"], before["a"])
    outgoing.drop_residuals()
    assert not residuals_of(outgoing)
