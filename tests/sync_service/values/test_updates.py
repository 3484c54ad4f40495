# SPDX-License-Identifier: Apache-2.0
"""Updates of a lossy round: everybody adds the same, whoever decodes it, and nothing is lost for good."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.outer.codecs.all_codecs import lossy_codecs
from megatron_ext.sync_service.peer.download import download
from megatron_ext.sync_service.peer.parts import Part
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.frames import Box, codec_of
from megatron_ext.sync_service.values.updates import kept_as, publish, publish_exactly
from tests.sync_service.service import Service


def again(codec: str, values: torch.Tensor) -> torch.Tensor:
    """Return what arrives of values that are sent at once."""
    return codec_of(codec).decode(codec_of(codec).encode(values), values.numel())


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(lossy_codecs()), st.integers(1, 700), st.floats(1e-6, 1e3), st.integers(0, 1000))
def test_whoever_decodes_an_update_gets_the_same_values(codec: str, numel: int, size: float, seed: int):
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(numel, generator=generator)
    step = size * torch.randn(numel, generator=generator) * (torch.rand(numel, generator=generator) < 0.8)
    wanted = before + step
    found = publish(codec, before, wanted.clone())
    assert found.update.dtype == kept_as(codec) and torch.equal(found.exact, wanted)
    update = found.update.float()
    assert not update.isnan().any()
    assert torch.equal(again(codec, update), update)
    assert torch.equal(found.values, before + update)
    # What a peer has coded is passed on unchanged.
    coded = -again(codec, step)
    exact = publish_exactly(codec, before, coded)
    assert torch.equal(exact.values, before + coded) and torch.equal(exact.update.float(), coded)
    assert torch.equal(exact.exact, exact.values)


def test_a_step_that_was_cut_in_another_way_is_sent_as_values():
    step = torch.linspace(-1, 1, 512)
    columns = again("int8", step.view(2, 256)[:, :128].reshape(-1)).view(2, 128)
    other = again("int8", step.view(2, 256)[:, 128:].reshape(-1)).view(2, 128)
    joined = torch.cat([columns, other], dim=1).reshape(-1)
    # Blocks of rows of a half have other scales than blocks of whole rows.
    joined[200] += 1e-4
    found = publish_exactly("int8", torch.ones(512), joined)
    assert found.update.isnan().all() and torch.equal(found.values, 1 + joined)


@pytest.mark.parametrize("codec", lossy_codecs())
def test_peers_that_hold_slices_get_the_values_of_those_that_hold_everything(
    make_service: Callable[..., Service], codec: str
):
    service = make_service(peers=1, outer_optimizer="sgd")
    service.start()
    spec = TensorSpec(name="w", shape=(24, 256))
    start = {"w": torch.randn(spec.shape, generator=torch.Generator().manual_seed(0))}
    boxes = [Box((0, 0), (8, 256)), Box((8, 0), (16, 100)), Box((8, 100), (16, 156)), Box((3, 7), (1, 200))]
    parts = [Part(key=str(number), spec=spec, box=box) for number, box in enumerate(boxes)]
    with service.client("p0", Catalog([spec]), codec=codec) as client:
        before = client.start(start)
        values = client.sync({"w": before["w"] * 1.01}).values
        arguments = client._route, client._pool, client._membership.caller, parts, 1, 2
        held = {part.key: before["w"][part.box.slices].contiguous() for part in parts}
        for found in (download(*arguments), download(*arguments, before=held)):
            for part in parts:
                assert torch.equal(found[part.key], values["w"][part.box.slices])


def test_what_updates_lose_arrives_with_later_ones(make_service: Callable[..., Service]):
    service = make_service(peers=2)
    service.start()
    spec = TensorSpec(name="w", shape=(256,))
    with (
        service.client("p0", Catalog([spec]), codec="int4") as first,
        service.client("p1", Catalog([spec]), codec="int4") as second,
    ):
        clients, rounds = (first, second), 8
        values, _ = [client.start({"w": torch.zeros(256)}) for client in clients]
        steps = [torch.linspace(0.1, 1.0, 256), torch.linspace(1.0, 0.3, 256)]
        for number in range(1, rounds + 1):
            sent = [{"w": values["w"] + step} for step in steps]
            for client, each in zip(clients, sent, strict=True):
                client.upload(number, each)
            taken = [client.fetch(number, each).values for client, each in zip(clients, sent, strict=True)]
            assert torch.equal(taken[0]["w"], taken[1]["w"])
            values = taken[0]
    off = (values["w"] - rounds * (steps[0] + steps[1]) / 2).abs().max()
    # Half a step of the coarsest scale for each direction, not for each round.
    assert 0 < float(off) < 2 * 1.0 / 7
