# SPDX-License-Identifier: Apache-2.0
"""The largest values alone, with their places."""

from __future__ import annotations

import math
from typing import Self

import torch

from megatron_ext.outer.codecs.cast import Bf16Codec
from megatron_ext.outer.codecs.codec import Codec, as_bytes, as_numbers

__all__ = ["CHUNK", "TopKCodec"]

# Elements among which the largest are chosen; a place in them takes 2 bytes.
CHUNK = 4096
DENSITY = 1 / 32
"""Fraction of the values that is kept unless another one is asked for."""


class TopKCodec(Codec):
    """The largest values of every chunk, as bf16, with their places; all others are 0."""

    name = "topk"
    grid = CHUNK
    dtype = torch.float32
    takes_density = True

    def __init__(self, density: float = DENSITY) -> None:
        """Take the fraction of values to keep, in (0, 1]; of every chunk at least one is."""
        if density != DENSITY:
            self.name = f"{type(self).name}:{density!r}"
        self._density = density
        self._cast = Bf16Codec()

    def for_results(self, messages: int) -> Self:
        """Return one that has room for what all the messages chose, since they chose different values."""
        return type(self)(min(1.0, self._density * messages))

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the whole chunks and of the rest."""
        whole, rest = divmod(numel, CHUNK)
        return whole * self._row_bytes(CHUNK) + (self._row_bytes(rest) if rest else 0)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return places and values of the whole chunks, then of the rest."""
        return torch.cat([self._encode_rows(rows) for rows in _rows(values)]) if values.numel() else as_bytes(values)

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the values at their places among zeros."""
        values = torch.zeros(numel, dtype=torch.float32, device=data.device)
        offset = 0
        for rows in _rows(values):
            end = offset + rows.shape[0] * self._row_bytes(rows.shape[1])
            places, numbers = self._decode_rows(data[offset:end], *rows.shape)
            # No -0: with another density it may have been left out, as 0.
            rows.scatter_(1, places, numbers.add(0.0))
            offset = end
        return values

    def _row_bytes(self, length: int) -> int:
        """Return the bytes of a chunk of this many values: 4 per value that is kept."""
        return 4 * self._kept(length)

    def _encode_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the bytes of chunks, (chunks, length)."""
        places = self._places(rows)
        numbers = self._cast.encode(rows.gather(1, places).view(-1))
        return torch.cat([as_bytes(places.to(torch.int16).view(-1)), numbers])

    def _decode_rows(self, data: torch.Tensor, chunks: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return places, int64, and values, fp32, both (chunks, kept), of the bytes of chunks."""
        kept = chunks * self._kept(length)
        places = as_numbers(data[: 2 * kept], torch.int16).view(chunks, -1).long()
        return places, self._cast.decode(data[2 * kept :], kept).view(chunks, -1)

    def _places(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the places of each row's largest values, (chunks, kept), in rising order."""
        # What is not a number counts as the largest of all, so that it is sent.
        size = rows.abs().nan_to_num(nan=math.inf, posinf=math.inf)
        # A stable sort, not topk: which of several equal values is chosen must not differ between ranks.
        order = size.sort(dim=1, descending=True, stable=True).indices
        return order[:, : self._kept(rows.shape[1])].sort(dim=1).values

    def _kept(self, numel: int) -> int:
        """Return how many values of a chunk of this many are kept."""
        return max(1, round(self._density * numel))


def _rows(values: torch.Tensor) -> list[torch.Tensor]:
    """Return views of the whole chunks, (chunks, CHUNK), and of the rest, (1, rest)."""
    whole = values.numel() // CHUNK * CHUNK
    parts = values[:whole].view(-1, CHUNK), values[whole:].view(1, -1)
    return [part for part in parts if part.numel()]
