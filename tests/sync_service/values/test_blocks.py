# SPDX-License-Identifier: Apache-2.0
"""Rounds that are made block by block, in one pass or two, have the bits of those made tensor by tensor."""

import os
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.frames import Box, Frame, cut, whole_box
from megatron_ext.sync_service.values import tensor_round
from megatron_ext.sync_service.values.blocks import BLOCK_ELEMENTS, Block, common_blocks
from megatron_ext.sync_service.values.contribution import Contribution
from megatron_ext.sync_service.values.decision import Decision, decide
from megatron_ext.sync_service.values.failpoints import Failpoints
from megatron_ext.sync_service.values.reduction import Contributor, Reduction
from megatron_ext.sync_service.values.reused_memory import ReusedMemory
from tests.support.every_run import one_of_each

CATALOG = Catalog(
    [
        TensorSpec(name="w", shape=(600, 500)),
        TensorSpec(name="e0", shape=(200_003,), owners=(0,)),
        TensorSpec(name="e1", shape=(300, 520), owners=(1,)),
        TensorSpec(name="e2", shape=(300, 520), owners=(1,)),
        TensorSpec(name="shared", shape=(410, 500), owners=(0, 1)),
        TensorSpec(name="b", shape=()),
    ]
)
FRAME_BYTES = 100_000
ROWS = {"w": [200], "e1": [130], "e2": [128, 138], "shared": [100]}
"""Where tensors are cut into boxes. In e1 a block could begin where the elements that share a scale in int8 do not; in
e2 the first block of an update can be coded as a part of the whole, and the next one cannot."""

NONE = OuterOptimizerConfig(outer_optimizer="none")


def contributor(folder: Path, index: int, codec: str, scale: float, *, rows_apart: bool = False) -> Contributor:
    """Return a contribution of random numbers, in frames of whole tensors or of some rows."""
    contribution = Contribution(folder / f"{index}-{codec}-{scale}.frames", CATALOG, codec)
    generator = torch.Generator().manual_seed(index)
    for spec in CATALOG:
        if scale == 1 or spec.is_trained_by(index):
            values = torch.randn(spec.shape, generator=generator) * scale
            for box in boxes(spec, rows_apart):
                part = values[box.slices].reshape(-1)
                for at, count in cut(part.numel(), FRAME_BYTES):
                    contribution.append(Frame.make(spec.name, spec.shape, box, at, part[at : at + count], codec))
    return Contributor(peer=f"p{index}", index=index, contribution=contribution)


def boxes(spec: TensorSpec, rows_apart: bool) -> list[Box]:
    if not rows_apart or spec.name not in ROWS:
        return [whole_box(spec.shape)]
    rows, columns = spec.shape
    places = [0, *ROWS[spec.name], rows]
    return [Box((begin, 0), (end - begin, columns)) for begin, end in pairwise(places)]


def reduction(codec: str, optimizer: OuterOptimizerConfig, before: Snapshot | None) -> Reduction:
    return Reduction(CATALOG, optimizer, codec=codec, before=before, outer_scalars={}, failpoints=Failpoints())


def started(folder: Path) -> Snapshot:
    writer, _ = reduction("fp32", NONE, None).write(
        folder / "start.safetensors", [contributor(folder, 0, "fp32", 1)], Decision()
    )
    writer.publish()
    return Snapshot(folder / "start.safetensors")


@pytest.mark.parametrize("rows_apart", [False, True])
@pytest.mark.parametrize(
    ("codec", "optimizer"),
    one_of_each(
        [("fp32", "none"), ("fp32", "sgd"), ("fp32", "adam"), ("bf16", "sgd"), ("int8", "none"), ("int4", "sgd")],
        {0, 2, 5},
    ),
)
def test_blocks_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, optimizer: str, rows_apart: bool
):
    before = started(tmp_path)
    peers = [contributor(tmp_path, index, codec, 0.5, rows_apart=rows_apart and index == 1) for index in range(3)]
    config = OuterOptimizerConfig(outer_optimizer=optimizer, outer_optimizer_lr=0.1 if optimizer == "adam" else None)
    found = []
    for way in ("blocks", "attempt", "whole"):
        made_by = reduction(codec, config, before)
        if way == "whole":
            monkeypatch.setattr(
                "megatron_ext.sync_service.values.sources.common_blocks", lambda numel, *_: [(0, numel)]
            )
        path = tmp_path / way / "round.safetensors"
        path.parent.mkdir()
        if way == "attempt":
            measured, made = made_by.attempt(path, peers)
            assert made is not None
        else:
            measured = made_by.measure(peers)
            members = [(peer.peer, peer.index) for peer in peers]
            decision = decide(CATALOG, members, measured, guards=None, max_norm=None, is_start=False, work={})
            assert decision.is_plain
            made = made_by.write(path, peers, decision)
        writer, facts = made
        writer.publish()
        norms = [square for peer in measured for square in peer.squares.values()]
        found.append((path.read_bytes(), facts, norms))
    assert found[0][:2] == found[1][:2] == found[2][:2]
    for other in found[1:]:
        assert found[0][2] == pytest.approx(other[2], rel=1e-9)


def test_one_thread_at_a_time_has_memory_for_a_large_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensor_round, "_LARGE_ELEMENTS", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    before = started(tmp_path)
    peers = [contributor(tmp_path, index, "bf16", 0.5) for index in range(3)]
    work = reduction("bf16", OuterOptimizerConfig(outer_optimizer="adam", outer_optimizer_lr=0.1), before)
    holding: dict[int, set[int]] = {}
    most = 0
    take, give_up = ReusedMemory.__call__, ReusedMemory.give_up

    def watched_take(self: ReusedMemory, use: str, count: int) -> torch.Tensor:
        nonlocal most
        holding.setdefault(id(self), set()).add(threading.get_ident())
        most = max(most, len(holding[id(self)]))
        return take(self, use, count)

    def watched_give_up(self: ReusedMemory) -> None:
        give_up(self)
        holding.setdefault(id(self), set()).discard(threading.get_ident())

    monkeypatch.setattr(ReusedMemory, "__call__", watched_take)
    monkeypatch.setattr(ReusedMemory, "give_up", watched_give_up)
    work.write(tmp_path / "round.safetensors", peers, Decision())[0].abandon()
    assert most == 1 and not any(holding.values())


def test_a_non_finite_contribution_leaves_nothing_of_an_attempt_and_is_named(tmp_path: Path):
    before = started(tmp_path)
    peers = [contributor(tmp_path, index, "fp32", scale) for index, scale in ((0, 0.5), (1, float("nan")))]
    there = sorted(tmp_path.iterdir())
    measured, made = reduction("fp32", NONE, before).attempt(tmp_path / "round.safetensors", peers)
    assert made is None and [entry.unusable for entry in measured] == [None, "w"]
    assert sorted(tmp_path.iterdir()) == there


@given(st.data())
def test_blocks_cover_a_tensor_once_and_cut_no_frame(data: st.DataObject):
    numel = data.draw(st.integers(1, 5 * BLOCK_ELEMENTS))
    cuts = st.lists(st.integers(1, 5 * BLOCK_ELEMENTS), max_size=30)
    frames: list[list[Block] | None] = []
    for _ in range(data.draw(st.integers(0, 3))):
        firsts = sorted({0, *(at for at in data.draw(cuts) if at < numel)})
        frames.append([(at, end - at) for at, end in zip(firsts, [*firsts[1:], numel], strict=True)])
    if data.draw(st.booleans()):
        frames.append(None)
    blocks = common_blocks(numel, frames, multiple := data.draw(st.sampled_from([1, 128])))
    assert [first for first, _ in blocks] == [0, *(first + count for first, count in blocks)][:-1]
    assert sum(count for _, count in blocks) == numel
    assert all(first % multiple == 0 for first, _ in blocks)
    for ranges in frames:
        begins = {0} if ranges is None else {first for first, _ in ranges}
        assert {first for first, _ in blocks} <= begins
