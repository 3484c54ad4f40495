# SPDX-License-Identifier: Apache-2.0
"""The codecs by name: what workers in a job, plain PyTorch and peers at a server may travel in."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from megatron_ext.outer.codecs.cast import CastCodec, Fp32Codec
from megatron_ext.outer.codecs.codec import Codec
from megatron_ext.outer.codecs.scaled import BlockCodec
from megatron_ext.outer.codecs.topk import TopKCodec

__all__ = ["CODEC_NAMES", "LOSSY_NAMES", "build_codec"]

_CODECS: dict[str, Callable[[], Codec]] = {
    "fp32": Fp32Codec,
    "bf16": lambda: CastCodec("bf16", torch.bfloat16),
    "fp16": lambda: CastCodec("fp16", torch.float16),
    "fp8": lambda: BlockCodec("fp8"),
    "int8": lambda: BlockCodec("int8"),
    "int4": lambda: BlockCodec("int4"),
    "topk": TopKCodec,
}

CODEC_NAMES = tuple(_CODECS)
LOSSY_NAMES = tuple(name for name in CODEC_NAMES if name != "fp32")


def build_codec(name: str, density: float | None = None) -> Codec:
    """Return the codec of a name.

    Args:
        name: one of `CODEC_NAMES`; 'topk' also with its density behind it, as in 'topk:0.125'.
        density: fraction of values that 'topk' keeps, in (0, 1].

    Raises:
        ValueError: there is no such codec.
    """
    kind, _, written = name.partition(":")
    if kind not in _CODECS or (written and kind != "topk"):
        raise ValueError(f"codec {name!r} is not known; use one of {', '.join(CODEC_NAMES)}")
    if kind != "topk" or (density is None and not written):
        return _CODECS[kind]()
    fraction = _fraction(written) if written else density
    if fraction is None or not 0 < fraction <= 1:
        raise ValueError(f"the density of codec {name!r} must be above 0 and at most 1")
    return TopKCodec(fraction)


def _fraction(written: str) -> float:
    try:
        return float(written)
    except ValueError:
        return math.nan
