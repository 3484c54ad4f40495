# SPDX-License-Identifier: Apache-2.0
"""A codec: fp32 without the last 8 bits of its mantissa, in 3 bytes; bf16 with 8 bits more."""

import torch

from megatron_ext.outer.codecs.codec import Codec


class Fp24Codec(Codec):
    """Values rounded to 16 bits of precision, to the nearest, ties to even. It only casts: every value by itself."""

    name = "fp24"
    grid = 1
    dtype = torch.float32

    def nbytes(self, numel: int) -> int:
        """Return 3 per value."""
        return 3 * numel

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the upper three bytes of the rounded values."""
        bits = values.view(torch.int32)
        rounded = bits + 0x7F + ((bits >> 8) & 1)
        # What would round up to infinity becomes the largest number, and what is not a number stays as it is.
        keeps = ~values.isfinite() | ~rounded.view(torch.float32).isfinite()
        kept = torch.where(values.isnan(), bits | 0x400000, bits)
        return torch.where(keeps, kept, rounded).view(torch.uint8).view(-1, 4)[:, 1:].reshape(-1)

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the values, whose last bits are 0."""
        whole = torch.zeros(numel, 4, dtype=torch.uint8, device=data.device)
        whole[:, 1:] = data.view(-1, 3)
        return whole.view(torch.float32).view(-1)
