# SPDX-License-Identifier: Apache-2.0
"""Updates: what a round adds to the values of the last one, coded as contributions are.

With a lossy codec the server, too, sends only what the codec can say, and adds to its values just that, so that all
hold the same bits. The values as they would be without loss are kept, and an outer step is made from those (error
feedback): what one update has lost is part of the next. Workers in a job do the same with their anchors and replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.disk.snapshot_names import state_name
from megatron_ext.sync_service.protocol.frames import Box, codec_of, cut

__all__ = [
    "EXACT",
    "RESIDUAL",
    "UPDATE",
    "Published",
    "can_be_cut",
    "full",
    "has_update",
    "kept_as",
    "publish",
    "publish_exactly",
]

UPDATE = "update"
"""State of a snapshot: what the round has added to the values; begins with NaN where that cannot be coded."""

EXACT = "exact"
"""State of a snapshot: the values, had no update ever lost anything."""

RESIDUAL = "residual"
"""State of snapshots of earlier releases, in the place of `EXACT`: what the update has lost."""

_CODED_BYTES = 1 << 20
"""Of fp32 values that are coded at a time."""


@dataclass(kw_only=True)
class Published:
    """What peers hold of a tensor after a round; 1-D."""

    values: torch.Tensor
    """The values, fp32."""

    update: torch.Tensor
    """What was added to the last ones, as `kept_as` says."""

    exact: torch.Tensor
    """The values without loss, fp32."""


def kept_as(codec: str) -> torch.dtype:
    """Return as what an update is kept: as it travels, where it can be cut there."""
    return codec_of(codec).dtype


def publish(codec: str, before: torch.Tensor, wanted: torch.Tensor) -> Published:
    """Return the values that come next to those that are wanted, and that a coded update leads to.

    Args:
        codec: its name.
        before: what peers hold, fp32, 1-D.
        wanted: what they should hold, fp32, 1-D.
    """
    update = _coded(codec, wanted - before)
    if codec_of(codec).grid > 1 and not torch.equal(_coded(codec, update), update):
        return full(codec, wanted)
    return Published(values=before + update, update=update.to(kept_as(codec)), exact=wanted)


def publish_exactly(codec: str, before: torch.Tensor, step: torch.Tensor) -> Published:
    """Return the values after a step that was coded before, by any process.

    Args:
        codec: its name.
        before: what peers hold, fp32, 1-D.
        step: what is added, fp32, 1-D.
    """
    if codec_of(codec).grid == 1:
        return _exactly(before + step, step.to(kept_as(codec)))
    update = _coded(codec, step)
    # A block may have been cut in another way, as when the peer's ranks hold columns.
    if not torch.equal(update, step):
        return full(codec, before + step)
    return _exactly(before + update, update)


def full(codec: str, values: torch.Tensor) -> Published:
    """Return values that no update leads to, so that they are sent as they are."""
    return _exactly(values, torch.full(values.shape, math.nan, dtype=kept_as(codec)))


def _exactly(values: torch.Tensor, update: torch.Tensor) -> Published:
    return Published(values=values, update=update, exact=values)


def has_update(snapshot: Snapshot, name: str, codec: str, first: int | None, box: Box, numel: int) -> bool:
    """Return whether a box of a tensor can be sent as an update.

    Args:
        snapshot: of the round.
        name: of the tensor.
        codec: in which it would be sent.
        first: position of the box's first element in the tensor when it has no gaps, else None.
        box: the box.
        numel: number of elements of the tensor.
    """
    state = state_name(UPDATE, name)
    if state not in snapshot or bool(snapshot.read(state, 0, 1).isnan()):
        return False
    return can_be_cut(codec, first, box, numel)


def can_be_cut(codec: str, first: int | None, box: Box, numel: int) -> bool:
    """Return whether a box of a tensor that was coded as a whole can be coded again, by itself, without loss.

    Args:
        codec: in which.
        first: position of the box's first element in the tensor when it has no gaps, else None.
        box: the box.
        numel: number of elements of the tensor.
    """
    grid = codec_of(codec).grid
    if grid == 1:
        return True
    # Only what is coded together can be coded again without loss.
    if first is None:
        return False
    end = first + box.numel
    return first % grid == 0 and (end % grid == 0 or end == numel)


def _coded(codec: str, values: torch.Tensor) -> torch.Tensor:
    """Return what arrives of values."""
    found, chosen = torch.empty_like(values), codec_of(codec)
    for offset, count in cut(values.numel(), _CODED_BYTES):
        at = slice(offset, offset + count)
        found[at] = chosen.decode(chosen.encode(values[at]), count)
    return found
