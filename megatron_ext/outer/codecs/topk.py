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
        """Return 4 per value that is kept."""
        whole, rest = divmod(numel, CHUNK)
        return 4 * (whole * self._kept(CHUNK) + (self._kept(rest) if rest else 0))

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return places and values of the whole chunks, then of the rest."""
        return torch.cat([self._encode_rows(rows) for rows in _rows(values)]) if values.numel() else as_bytes(values)

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the values at their places among zeros."""
        values = torch.zeros(numel, dtype=torch.float32, device=data.device)
        offset = 0
        for rows in _rows(values):
            kept = rows.shape[0] * self._kept(rows.shape[1])
            places = as_numbers(data[offset : offset + 2 * kept], torch.int16).view(rows.shape[0], -1).long()
            # No -0: with another density it may have been left out, as 0.
            numbers = self._cast.decode(data[offset + 2 * kept : offset + 4 * kept], kept).add(0.0)
            rows.scatter_(1, places, numbers.view(rows.shape[0], -1))
            offset += 4 * kept
        return values

    def _encode_rows(self, rows: torch.Tensor) -> torch.Tensor:
        # What is not a number counts as the largest of all, so that it is sent.
        size = rows.abs().nan_to_num(nan=math.inf, posinf=math.inf)
        # A stable sort, not topk: which of several equal values is chosen must not differ between ranks.
        order = size.sort(dim=1, descending=True, stable=True).indices
        places = order[:, : self._kept(rows.shape[1])].sort(dim=1).values
        numbers = self._cast.encode(rows.gather(1, places).view(-1))
        return torch.cat([as_bytes(places.to(torch.int16).view(-1)), numbers])

    def _kept(self, numel: int) -> int:
        return max(1, round(self._density * numel))


def _rows(values: torch.Tensor) -> list[torch.Tensor]:
    """Return views of the whole chunks, (chunks, CHUNK), and of the rest, (1, rest)."""
    whole = values.numel() // CHUNK * CHUNK
    parts = values[:whole].view(-1, CHUNK), values[whole:].view(1, -1)
    return [part for part in parts if part.numel()]
