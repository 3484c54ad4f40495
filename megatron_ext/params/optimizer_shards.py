# SPDX-License-Identifier: Apache-2.0
"""Which elements of its parameters a rank's optimizer owns, and where their fp32 values are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)

from megatron_ext.params.fsdp_shards import first_row, is_sharded, local_part
from megatron_ext.params.tensors import ParamsError
from megatron_ext.params.view import LocalParameter, ParameterView


@dataclass(frozen=True, kw_only=True, eq=False)
class DpShard:
    """The part of one local parameter that this rank's optimizer updates."""

    entry: LocalParameter
    """The parameter."""

    member: int
    """Index of its optimizer in ``optimizer_members``."""

    start: int
    """First owned element of the flattened local parameter."""

    stop: int
    """One past the last; equal to ``start`` when another data parallel rank owns all of it."""

    main: torch.Tensor | None
    """The values the optimizer updates: fp32, ``stop - start`` elements in the parameter's order. For fp32
    parameters it shares memory with the parameter. None when the rank owns nothing, and when the inner
    optimizer keeps the fp32 values itself (precision-aware optimizer)."""

    is_alone: bool
    """Whether no other data parallel rank of the optimizer instance updates these elements: the distributed optimizer
    and FSDP2 cut parameters into shards, and the layer-wise one gives whole parameters to ranks."""

    is_copy: bool = False
    """Whether a rank of an earlier instance updates the same elements (`--num-distributed-optimizer-instances`)."""

    @property
    def numel(self) -> int:
        """Number of owned elements."""
        return self.stop - self.start


def dp_shards(optimizer: Any, view: ParameterView) -> tuple[DpShard, ...]:
    """What this rank's optimizer owns.

    Args:
        optimizer: the ``MegatronOptimizer``, chained or not.
        view: the rank's parameter view.

    Returns:
        One shard per trained parameter of this rank, in the view's order, with an empty range where another
        rank owns it all. Frozen parameters, which no optimizer knows, are left out.

    Raises:
        ParamsError: for an optimizer class this function does not know, and for a parameter that is not in
            the view or in two optimizers.
    """
    shards: dict[int, DpShard] = {}
    layer_wise = layer_wise_optimizers(optimizer)
    alone = {id(member) for part in layer_wise for member in optimizer_members(part)}
    for index, member in enumerate(optimizer_members(optimizer)):
        is_alone = isinstance(member, DistributedOptimizer) or id(member) in alone
        for parameter, start, stop, main in _owned(member):
            entry = _entry_of(view, parameter)
            if id(parameter) in shards:
                raise ParamsError(f"{entry.tensor.name} is in two optimizers")
            shards[id(parameter)] = DpShard(
                entry=entry,
                member=index,
                start=start,
                stop=stop,
                main=main,
                is_alone=is_alone or is_sharded(parameter),
                is_copy=getattr(member, "distributed_optimizer_instance_id", 0) > 0,
            )
    for parameter in (parameter for part in layer_wise for parameter in _dealt_out(part)):
        if id(parameter) not in shards:  # another rank's
            shards[id(parameter)] = DpShard(
                entry=_entry_of(view, parameter), member=0, start=0, stop=0, main=None, is_alone=True
            )
    return tuple(shards[id(entry.parameter)] for entry in view.entries if id(entry.parameter) in shards)


def optimizer_members(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that a (perhaps chained) ``MegatronOptimizer`` consists of, without the empty ones."""
    if isinstance(optimizer, ChainedOptimizer):
        for member in optimizer.chained_optimizers:
            yield from optimizer_members(member)
    elif not getattr(optimizer, "is_stub_optimizer", False):
        yield optimizer


def owned_parts(optimizer: Any) -> Iterator[tuple[torch.Tensor, int, int, torch.Tensor | None]]:
    """Yield (parameter, start, stop, main values) for every parameter that a rank's optimizer knows.

    Args:
        optimizer: the `MegatronOptimizer`, chained or not.

    Raises:
        ParamsError: it is of a kind that is not known.
    """
    for member in optimizer_members(optimizer):
        yield from _owned(member)


def layer_wise_optimizers(optimizer: Any) -> list[Any]:
    """Return the parts of a (perhaps chained) ``MegatronOptimizer`` that give whole parameters to ranks."""
    if isinstance(optimizer, LayerWiseDistributedOptimizer):
        return [optimizer]
    if isinstance(optimizer, ChainedOptimizer):
        return [part for member in optimizer.chained_optimizers for part in layer_wise_optimizers(member)]
    return []


def _entry_of(view: ParameterView, parameter: torch.Tensor) -> LocalParameter:
    try:
        return view.by_parameter(parameter)
    except KeyError:
        raise ParamsError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the parameter view"
        ) from None


def _dealt_out(layer_wise: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters that a layer-wise optimizer has given to the ranks of a group, this one's among them."""
    for lists in (layer_wise.dp_cp_params_list, getattr(layer_wise, "expt_dp_params_list", None)):
        for parameters in lists or ():  # none where a rank is alone in its group
            yield from parameters


def _owned(optimizer: Any) -> Iterator[tuple[torch.Tensor, int, int, torch.Tensor | None]]:
    """Yield (parameter, start, stop, main values) for every parameter of one optimizer."""
    if isinstance(optimizer, DistributedOptimizer):
        yield from _owned_by_distributed(optimizer)
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for group, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(group, mains, strict=True):
                yield _held(parameter, main)
        for group in optimizer.fp32_from_fp32_groups:
            for parameter in group:
                yield _held(parameter, parameter)
    elif isinstance(optimizer, FP32Optimizer):
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                yield _held(parameter, parameter)
    else:
        raise ParamsError(
            f"the parameter view does not know which elements a {type(optimizer).__name__} "
            f"updates; use the distributed optimizer or a plain one"
        )


def _held(parameter: torch.Tensor, main: torch.Tensor) -> tuple[torch.Tensor, int, int, torch.Tensor]:
    """Return what `_owned` yields for a parameter of which this rank updates all that it holds."""
    values = local_part(main).detach().view(-1)
    start = first_row(parameter) * math.prod(parameter.shape[1:])
    return parameter, start, start + values.numel(), values


def _owned_by_distributed(optimizer: Any) -> Iterator[tuple[torch.Tensor, int, int, torch.Tensor | None]]:
    mains: dict[int, torch.Tensor | None] = {}
    for groups, main_groups in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for group, main_group in zip(groups, main_groups, strict=True):
            for parameter, main in zip(group, main_group, strict=True):
                mains[id(parameter)] = None if main is None else main.detach()
    for buffer in optimizer.buffers:
        for parameter in buffer.params:
            if parameter not in optimizer.model_param_gbuf_map:
                yield parameter, 0, 0, None
                continue
            owned = optimizer._get_model_param_range_map(parameter)["param"]
            yield parameter, owned.start, owned.end, mains[id(parameter)]
