# SPDX-License-Identifier: Apache-2.0
"""Seam: the authoritative fp32 values inside Megatron's optimizers, and refreshing the model from them.

Which tensor is authoritative depends on the optimizer: the model's own parameter (fp32), its fp32 copy (bf16 and
fp16), this rank's shard of that copy (distributed optimizer), or the copies of the parameters that are this rank's
(layer-wise optimizer). With torch's FSDP2 it is this rank's rows of the first two. Nothing here is a patch.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ext.params import LocalParameter, ParameterView
from megatron_ext.params.fsdp_shards import is_sharded, local_part
from megatron_ext.params.moments import reset_non_finite_moments

__all__ = [
    "InnerValues",
    "Value",
    "fill_empty_states",
    "fill_momentum",
    "is_distributed",
    "name_step_zero",
    "take_steps",
]


@dataclass(frozen=True, kw_only=True)
class Value:
    """One authoritative tensor of this rank."""

    tensor: torch.Tensor
    """fp32; 1-D for a shard of the distributed optimizer, else in the shape of the parameter, of which FSDP2 gives
    this rank some rows. Detached, and sharing memory with what the inner optimizer updates."""

    entry: LocalParameter
    """The model parameter that it stands for, and its place in the model."""

    start: int
    """Its first element among those of the flattened parameter."""

    member: int
    """Index of its optimizer in `InnerValues.members`."""

    is_alone: bool
    """Whether no other data-parallel rank of the optimizer instance updates these elements, see `DpShard`."""

    is_copy: bool = False
    """Whether a rank of an earlier optimizer instance updates the same elements."""

    @property
    def counts_once(self) -> bool:
        """Whether sums over all ranks of a job have to count these elements: of equal copies, one has."""
        return self.entry.placed.counts_once(is_shard=self.is_alone) and not self.is_copy


class InnerValues:
    """The values of one rank, in an order that is the same on all ranks with the same shard."""

    def __init__(self, optimizer: Any, view: ParameterView) -> None:
        """Find the values.

        Args:
            optimizer: the `MegatronOptimizer` of this rank.
            view: the global parameter view of this rank's model.

        Raises:
            ParamsError: the optimizer is of a kind whose authoritative values are not known, or holds a
                parameter that the view does not know.
        """
        # Imported here because it imports Megatron, whose import the command line tools can do without.
        from megatron_ext.params.optimizer_shards import dp_shards, layer_wise_optimizers, optimizer_members

        self.view = view
        self.members = list(optimizer_members(optimizer))
        self._layer_wise = layer_wise_optimizers(optimizer)
        self.values = []
        for shard in dp_shards(optimizer, view):
            if shard.main is not None:
                whole = not is_distributed(self.members[shard.member])
                tensor = shard.main.view(local_part(shard.entry.parameter).shape) if whole else shard.main
                self.values.append(
                    Value(
                        tensor=tensor,
                        entry=shard.entry,
                        start=shard.start,
                        member=shard.member,
                        is_alone=shard.is_alone,
                        is_copy=shard.is_copy,
                    )
                )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The authoritative tensors."""
        return [value.tensor for value in self.values]

    @property
    def is_layer_wise(self) -> bool:
        """Whether an optimizer gives whole parameters to ranks."""
        return bool(self._layer_wise)

    def is_shard(self, value: Value) -> bool:
        """Return whether this rank alone updates a value, where other data-parallel ranks have others."""
        return value.is_alone

    def reset_non_finite_moments(self) -> None:
        """Set the non-finite elements of the optimizers' states to zero."""
        for member in self.members:
            reset_non_finite_moments(member.optimizer)

    @torch.no_grad()
    def refresh(self, now: bool = False) -> None:
        """Bring the model's parameters up to date after the values were changed.

        Args:
            now: gather what ranks update alone at once. Otherwise, with overlapped gathering, the next forward pass
                does it, as after any optimizer step.
        """
        for member in self.members:
            if hasattr(member, "_copy_main_params_to_model_params"):
                member._copy_main_params_to_model_params()
        for part in self._layer_wise:
            if not part.overlap_param_gather and not part.use_buffer_param_sync:
                part.allgather_params()
            else:
                _gather(part, overlapped=part.overlap_param_gather, now=now)
        for member in self.members:
            if is_distributed(member):
                _gather(member, overlapped=member.ddp_config.overlap_param_gather, now=now)

    @torch.no_grad()
    def refresh_units(self, units: Collection[str]) -> None:
        """Bring this rank's part of the parameters of some units up to date; what must be gathered is left to others.

        Args:
            units: their names.
        """
        for value in self.values:
            if value.entry.unit in units:
                flat = local_part(value.entry.parameter).detach().view(-1)
                if not is_sharded(value.entry.parameter):
                    flat = flat[value.start : value.start + value.tensor.numel()]
                if flat.data_ptr() != value.tensor.data_ptr():  # a parameter in fp32 is its own value
                    flat.copy_(value.tensor.view(-1))


def _gather(part: Any, *, overlapped: bool, now: bool) -> None:
    """Bring the parameters together that the ranks of one of Megatron's optimizers have updated, see `refresh`."""
    if not overlapped and not now:
        part.start_param_sync_for_bucket_group_subset()
        return
    for chunk in part.model_chunks:
        # Megatron puts the hooks of the forward pass in place after the first step that was not skipped.
        if now or not chunk.remove_forward_pre_hook_handles:
            chunk.start_param_sync(force_sync=True)


def fill_empty_states(optimizer: Any) -> bool:
    """Give optimizers that have not stepped yet the state that their first step would give them.

    Megatron's checkpoints leave an empty state out and cannot be loaded then, as after fp16 has skipped all steps.

    Args:
        optimizer: the `MegatronOptimizer` of this rank.

    Returns:
        Whether there was one without a distributed state, whose step has to be named: `name_step_zero`.
    """
    from megatron_ext.params.optimizer_shards import optimizer_members

    filled = False
    for member in optimizer_members(optimizer):
        inner = member.optimizer
        if member.init_state_fn is None or inner.state:
            continue
        member.init_state_fn(inner, member.config)
        if isinstance(inner, torch.optim.Adam):  # AdamW as well; it takes a state for complete once there is any
            for state in inner.state.values():
                state["step"] = torch.tensor(0.0)
            # Others, as Apex' and Transformer Engine's, count steps elsewhere.
            filled |= not is_distributed(member)
    return filled


@torch.no_grad()
def fill_momentum(inner: torch.optim.Optimizer | None, config: Any = None) -> None:
    """Give SGD the state that its first step would give it: the `init_state_fn` that Megatron has for Adam alone.

    Args:
        inner: what a `MegatronOptimizer` holds; None on ranks that train nothing with it.
        config: not used; Megatron passes its `OptimizerConfig`.
    """
    if inner is None:
        return
    for group in inner.param_groups:
        # torch's SGD keeps nothing without momentum; the fused ones of Apex and Transformer Engine always do.
        if isinstance(inner, torch.optim.SGD) and group["momentum"] == 0:
            continue
        for parameter in group["params"]:
            if not inner.state[parameter]:
                inner.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def name_step_zero(state: Any) -> None:
    """Put the common step of 0 into an optimizer's state dict, in place: Megatron leaves it out, and cannot load that.

    Args:
        state: of the `MegatronOptimizer`, with its tensors sharded.
    """
    for inner in _inner_states(state):
        if isinstance(inner.get("state"), dict):
            inner["state"].setdefault("common_step", torch.tensor(0.0))


@torch.no_grad()
def take_steps(optimizer: Any, state: Any) -> None:
    """Let an optimizer continue with the steps counted in a state of which its tensors have been read in place.

    Args:
        optimizer: the `MegatronOptimizer` of this rank.
        state: its state dict as it was read.
    """
    from megatron_ext.params.optimizer_shards import optimizer_members

    for member, inner in zip(optimizer_members(optimizer), _inner_states(state), strict=True):
        step = inner["state"].get("common_step")
        for own in member.optimizer.state.values():
            if step is not None:
                own["step"] = copy.deepcopy(step)
        for group, saved in zip(member.optimizer.param_groups, inner["param_groups"], strict=True):
            if "step" in saved:  # where the fused ones of Apex and Transformer Engine count
                group["step"] = copy.deepcopy(saved["step"])


def _inner_states(state: Any) -> list[Any]:
    """Return the state of every torch optimizer in that of a (perhaps chained) `MegatronOptimizer`."""
    is_chain = isinstance(state, dict) and all(isinstance(key, int) for key in state)
    members = [state[key] for key in sorted(state)] if is_chain else [state]
    return [member.get("optimizer", member) for member in members]


def is_distributed(member: Any) -> bool:
    """Return whether an optimizer shards its state over the data-parallel ranks."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return isinstance(member, DistributedOptimizer)
