# SPDX-License-Identifier: Apache-2.0
"""Segments in memory: views of large tensors, packed copies of small ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ext.local_sgd.exchange.segments import Segment

__all__ = ["flattened", "packed", "put_back", "unpack"]


def flattened(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return 1-D views of the tensors, and a copy of one that is not contiguous."""
    return [tensor.reshape(-1) for tensor in tensors]


def put_back(flats: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Write the copies among `flats` back."""
    for flat, tensor in zip(flats, tensors, strict=True):
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))


def packed(segment: Segment, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the elements of a segment as tensors one after the other: views, then a copy of the small pieces."""
    views = [flats[piece.index][piece.start : piece.stop] for piece in segment.pieces]
    small = [flats[piece.index][piece.start : piece.stop] for piece in segment.small]
    return [*views, torch.cat(small)] if small else views


def unpack(segment: Segment, tensors: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> None:
    """Write the copy that `packed` made back."""
    if segment.small:
        offset = 0
        for piece in segment.small:
            flats[piece.index][piece.start : piece.stop] = tensors[-1][offset : offset + piece.numel]
            offset += piece.numel
