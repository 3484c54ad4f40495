# SPDX-License-Identifier: Apache-2.0
"""Rows of tensors that FSDP2 gives to ranks, told in global terms."""

import math

import pytest

from megatron_ext.params import Split
from megatron_ext.params.boxes import Piece, cut, whole
from megatron_ext.params.fsdp_shards import pieces_of_rows


def test_rows_of_a_gated_tensor_are_found_in_both_halves():
    # Rank 1 of 2 holds rows 3 to 5 of the gate and 9 to 11 of the other half: its rows 0 to 2 and 3 to 5.
    held = cut("fc1", (12, 2), Split(axis=0, blocks=(6, 6)), 1, 2).pieces
    assert pieces_of_rows(held, 2, 5) == (Piece((5, 0), (0, 0), (1, 2)), Piece((9, 0), (1, 0), (2, 2)))


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_the_rows_of_all_ranks_are_the_tensor(parts):
    rows = -(-7 // parts)
    found = []
    for rank in range(parts):
        start, stop = min(7, rank * rows), min(7, (rank + 1) * rows)
        pieces = pieces_of_rows(whole((7, 3)).pieces, start, stop)
        assert sum(math.prod(piece.shape) for piece in pieces) == 3 * (stop - start)
        found += [row + piece.global_start[0] for piece in pieces for row in range(piece.shape[0])]
    assert found == list(range(7))
