# SPDX-License-Identifier: Apache-2.0
"""Parts: what one process of a peer holds of the run's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron_ext.errors import UserError
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.frames import Box, whole_box

__all__ = ["Part", "Values", "by_place", "checked_memory", "whole_parts"]

Values = Mapping[str, torch.Tensor]
"""The values of parts by their keys: fp32, on the CPU, in the shape of the box."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A box of a tensor, held by one process."""

    key: str
    """What it is called in `Values`; the tensor's own name when it is the whole of it."""

    spec: TensorSpec
    """The tensor."""

    box: Box
    """Which elements."""

    is_primary: bool = True
    """Whether this process uploads it; others that hold the same elements only download them."""


def whole_parts(catalog: Catalog) -> tuple[Part, ...]:
    """Return the parts of a process that holds everything."""
    return tuple(Part(key=spec.name, spec=spec, box=whole_box(spec.shape)) for spec in catalog)


def by_place(parts: Iterable[Part], values: Values | None) -> dict[tuple[str, Box], torch.Tensor]:
    """Return values of parts by tensor and box, as far as there are any."""
    return {(part.spec.name, part.box): values[part.key] for part in parts if values and part.key in values}


def checked_memory(parts: Iterable[Part], out: Values, values: Values) -> Values:
    """Return memory for a round's values.

    Args:
        parts: whose it is.
        out: the memory, by the parts' keys.
        values: what is sent meanwhile.

    Raises:
        UserError: something in it is not memory for its part, or is that of values that are sent.
    """
    sent = {value.data_ptr() for value in values.values()}
    for part in parts:
        memory = out.get(part.key)
        if memory is None:
            continue
        is_plain = memory.dtype == torch.float32 and memory.device.type == "cpu" and memory.is_contiguous()
        if not is_plain or tuple(memory.shape) != part.box.shape:
            raise UserError(
                f"out: {part.key!r} is {memory.dtype} of shape {tuple(memory.shape)} on {memory.device}; it must "
                f"be torch.float32 of shape {part.box.shape} on the CPU, contiguous"
            )
        if memory.numel() and memory.data_ptr() in sent:
            raise UserError(f"out: {part.key!r} is the memory of values that are sent; give other memory")
    return out
