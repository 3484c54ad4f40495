# SPDX-License-Identifier: Apache-2.0
"""What is refused about another package's codec before a run begins, as far as its class and small tensors show it.

Values that differ between those who decode the same message would let workers or peers drift apart unseen.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron_ext.outer.class_checks import claim_problems, missing_problems, same_bits
from megatron_ext.outer.codecs.codec import LARGEST_GRID, Codec, as_bytes
from megatron_ext.outer.places import Where

__all__ = ["codec_problems"]

_MESSAGES = 3
"""Of which there is a mean."""


def codec_problems(name: str, kind: Any) -> list[str]:
    """Return what keeps an object from being the codec of a name, one sentence each."""
    if not (isinstance(kind, type) and issubclass(kind, Codec)):
        return ["it is not a class derived from megatron_ext.outer.codecs.codec.Codec"]
    missing = missing_problems(kind, "name", "grid", "dtype")
    if missing:
        return missing
    problems = claim_problems(name, kind)
    if not isinstance(kind.grid, int) or kind.grid < 1:
        problems.append(f"its grid is {kind.grid!r}; it must be a number of elements, 1 where each is coded by itself")
    if not (isinstance(kind.dtype, torch.dtype) and kind.dtype.is_floating_point):
        problems.append(f"its dtype is {kind.dtype!r}; it must be a floating-point type of torch")
    if problems:
        return problems
    codec = kind()
    return _coding_problems(codec) or _server_problems(codec)


def _coding_problems(codec: Codec) -> list[str]:
    """Return the problems of bytes and values, one sentence at most."""
    grid = codec.grid
    # Whole ones, and the beginning of another; one more than a few, so that values stand at odd places.
    values = torch.randn(2 * grid + grid // 2 + 5, generator=torch.Generator().manual_seed(0))
    values[:3] = torch.tensor([0.0, -0.0, 1e-40])
    before = values.clone()
    for numel in (0, 1, grid, values.numel()):
        coded = codec.encode(values[:numel])
        if coded.dtype != torch.uint8 or tuple(coded.shape) != (codec.nbytes(numel),):
            return [
                f"encode makes {coded.dtype} of shape {tuple(coded.shape)} of {numel} values; it must be uint8 of "
                f"shape ({codec.nbytes(numel)},), as nbytes says"
            ]
        decoded = codec.decode(coded, numel)
        if decoded.dtype != torch.float32 or tuple(decoded.shape) != (numel,):
            return [
                f"decode makes {decoded.dtype} of shape {tuple(decoded.shape)} of {numel} values; it must be fp32 of "
                f"shape ({numel},)"
            ]
    if not same_bits(values, before):
        return ["encode changes the values that it is given"]
    if not torch.equal(codec.encode(values), coded):
        return ["encode makes other bytes of the same values the second time; workers and peers would drift apart"]
    moved = torch.cat([coded.new_zeros(1), coded])[1:]
    if not same_bits(codec.decode(moved, values.numel()), decoded):
        return ["decode gives other values where the bytes begin at an odd address; see codec.as_numbers"]
    parts = [codec.decode(codec.encode(part), part.numel()) for part in torch.split(values, grid)]
    if not same_bits(torch.cat(parts), decoded):
        return [f"parts of {grid} elements, which is its grid, decode to other values by themselves than all at once"]
    for again in (decoded, -decoded) if grid == 1 else ():
        if not same_bits(codec.decode(codec.encode(again), again.numel()), again):
            return ["what it decodes to, or its opposite, is not coded without loss, which a grid of 1 promises"]
    if codec.decode(codec.encode(torch.zeros(grid)), grid).view(torch.int32).any():
        return ["zeros do not decode to zeros, which are not sent at all"]
    if not same_bits(decoded.to(codec.dtype).float(), decoded):
        return [f"its dtype, {codec.dtype}, does not hold what it decodes to"]
    if codec.is_cast and not (grid == 1 and torch.equal(coded, as_bytes(decoded.to(codec.dtype)))):
        return [f"it does not cast: its bytes are not those of {codec.dtype}; let is_cast be False"]
    for special in (math.nan, math.inf, -math.inf):
        values[grid] = special
        if codec.decode(codec.encode(values), values.numel()).isfinite().all():
            return [f"{special} decodes to a finite value, which hides that a worker has diverged"]
    return []


def _server_problems(codec: Codec) -> list[str]:
    """Return what a server needs of a codec that claims to work there, and does not have."""
    claimed = [place for place in (Where.SERVER, Where.ASYNCHRONOUS) if place not in codec.refused_in]
    if not claimed:
        return []
    problems = []
    if codec.grid > LARGEST_GRID:
        problems.append(f"its grid is {codec.grid}, and a frame holds at most {LARGEST_GRID} elements")
    elif codec.nbytes(LARGEST_GRID) > 4 * LARGEST_GRID:
        problems.append(f"it makes {codec.nbytes(LARGEST_GRID)} bytes of {LARGEST_GRID} values, more than fp32")
    results = codec.for_results(_MESSAGES)
    base, _, density = results.name.partition(":")
    if base != codec.name or bool(density) > codec.takes_density:
        problems.append(
            f"for_results gives one named {results.name!r}, which nobody else could make of the name; name it "
            f"{codec.name!r}{', or with the density behind it' if codec.takes_density else ''}"
        )
    where = " and ".join(place.value for place in claimed)
    return [f"{problem}; repair that, or put {where} into refused_in" for problem in problems]
