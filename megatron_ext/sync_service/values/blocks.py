# SPDX-License-Identifier: Apache-2.0
"""Blocks: the ranges of a tensor's elements that a round is made by, one after the other.

A block is small enough for a processor's cache, so that what is read of all contributions is checked, measured, added
up, written and summed while it is there. It begins and ends where frames of all contributions do, since a frame can
only be checked as a whole. Where the peers' layouts have no such places in common, the tensor is one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["BLOCK_ELEMENTS", "Block", "common_blocks"]

Block = tuple[int, int]
"""(first element, count) in the row-major order of a tensor."""

BLOCK_ELEMENTS = 1 << 16
"""About as many are in a block, if contributions do not want larger ones."""


def common_blocks(numel: int, frames: Sequence[Sequence[Block] | None], multiple: int = 1) -> list[Block]:
    """Return the blocks of a tensor.

    Args:
        numel: number of its elements.
        frames: for every contribution the ranges of its frames, in order; None where they are not ranges.
        multiple: of what the first element of every block has to be.
    """
    borders: set[int] | None = None
    for ranges in frames:
        found = set() if ranges is None else {first for first, _ in ranges}
        borders = found if borders is None else borders & found
    if borders is None:
        borders = set(range(0, numel, BLOCK_ELEMENTS))
    places = [0]
    for border in sorted(borders):
        if border - places[-1] >= BLOCK_ELEMENTS and border % multiple == 0:
            places.append(border)
    return [(first, end - first) for first, end in pairwise([*places, numel])]
