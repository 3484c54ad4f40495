# SPDX-License-Identifier: Apache-2.0
"""The codecs by name: what workers in a job, plain PyTorch and peers at a server may travel in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import UserError
from megatron_ext.plugins import Registry

if TYPE_CHECKING:
    from megatron_ext.outer.codecs.codec import Codec

__all__ = ["CODECS", "EXACT_CODEC", "build_codec", "densities", "density_fits", "lossy_codecs", "takes_density"]

EXACT_CODEC = "fp32"
"""The one that loses nothing, in which values travel; in all others pseudo-gradients do."""

# By name, so that a list of them imports nothing.
_OWN = {
    EXACT_CODEC: "megatron_ext.outer.codecs.cast:Fp32Codec",
    "bf16": "megatron_ext.outer.codecs.cast:Bf16Codec",
    "fp16": "megatron_ext.outer.codecs.cast:Fp16Codec",
    "fp8": "megatron_ext.outer.codecs.scaled:Fp8Codec",
    "int8": "megatron_ext.outer.codecs.scaled:Int8Codec",
    "int4": "megatron_ext.outer.codecs.scaled:Int4Codec",
    "topk": "megatron_ext.outer.codecs.topk:TopKCodec",
    "topk2": "megatron_ext.outer.codecs.topk_packed:TopKPackedCodec",
}


def _problems(name: str, kind: Any) -> list[str]:
    from megatron_ext.outer.codecs.codec_checks import codec_problems

    return codec_problems(name, kind)


CODECS: Registry[type[Codec]] = Registry("codec", "megatron_ext.codecs", _OWN, _problems)
"""Other packages add theirs under the entry-point group `megatron_ext.codecs`."""


def lossy_codecs() -> tuple[str, ...]:
    """Return the names of the codecs that compress."""
    return tuple(name for name in CODECS.names() if name != EXACT_CODEC)


def takes_density(name: str | None) -> bool:
    """Return whether the codec of a name keeps a fraction of the values, which can be given."""
    return name is not None and CODECS.find(name).takes_density


def density_fits(name: str | None, density: float) -> bool:
    """Return whether a density may be asked for, of the codec of a name or where there is none."""
    return 0 < density <= 1 and density >= _smallest_density(name)


def densities(name: str | None) -> str:
    """Return in words which densities may be asked for."""
    smallest = _smallest_density(name)
    return f"at least {smallest:g} with {name}, and at most 1" if smallest else "above 0 and at most 1"


def _smallest_density(name: str | None) -> float:
    return CODECS.find(name).smallest_density if name is not None else 0.0


def build_codec(name: str, density: float | None = None) -> Codec:
    """Return the codec of a name.

    Args:
        name: one of `CODECS`; one that takes a density also with that behind it, as in 'topk:0.125'.
        density: fraction of values that such a codec keeps, in (0, 1]; without effect on others.

    Raises:
        UserError: there is no such codec, or it cannot be loaded.
    """
    kind_name, colon, written = name.partition(":")
    kind = CODECS.find(kind_name)
    if not kind.takes_density:
        if colon:
            raise UserError(f"codec {name!r} has a density, which {kind_name} does not take; drop it")
        return kind()
    if not colon and density is None:
        return kind()
    fraction = _fraction(written) if colon else density
    if fraction is None or not density_fits(kind_name, fraction):
        raise UserError(f"the density of codec {name!r} must be {densities(kind_name)}")
    return kind(fraction)  # type: ignore[call-arg]  # its class says that it takes one


def _fraction(written: str) -> float:
    try:
        return float(written)
    except ValueError:
        return math.nan
