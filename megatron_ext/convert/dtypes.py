# SPDX-License-Identifier: Apache-2.0
"""The types that weights are converted to, and values that have a place in them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import UserError

if TYPE_CHECKING:
    import torch  # at run time where it is needed: the command line's help is not worth its import

__all__ = ["DTYPES", "described_dtype", "fitting", "trained_dtype"]

DTYPES: Mapping[str, str] = MappingProxyType({"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"})
"""Torch's names of those that Megatron trains in, by the name that --dtype has for each."""


def trained_dtype(dtype: torch.dtype, where: object) -> torch.dtype:
    """Return a type if Megatron trains in it.

    Args:
        dtype: of the weights.
        where: they are.

    Raises:
        UserError: it does not.
    """
    told = str(dtype).removeprefix("torch.")
    if told not in DTYPES.values():
        raise UserError(f"{where}: the weights are {told}; choose one of {', '.join(DTYPES)} for them with --dtype")
    return dtype


def fitting(
    values: torch.Tensor, dtype: torch.dtype, name: str, *, fix: str = "choose another --dtype"
) -> torch.Tensor:
    """Return values in another type; what was infinite or no number before stays so.

    Args:
        values: of any type and shape.
        dtype: that they get.
        name: of the tensor.
        fix: what to do about one that does not fit.

    Raises:
        UserError: a finite value is too large for the type.
    """
    import torch

    made = values.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(values.dtype).max and bool((values.isfinite() & ~made.isfinite()).any()):
        raise UserError(f"{name}: has values beyond {torch.finfo(dtype).max:.4g}, the largest in {dtype}; {fix}")
    return made


def described_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the type that a ``config.json`` says its weights have, as torch calls it; None where it does not say."""
    found = config.get("dtype") or config.get("torch_dtype")
    return None if found is None else str(found)
