# SPDX-License-Identifier: Apache-2.0
"""Seam: sharded entries of a Megatron state dict. Nothing here is a patch.

Tensors next to the inner optimizer's values (the anchor, the outer momentum) are written by the very
code that writes the inner optimizer's: in model space for plain optimizers, and in the distributed optimizer's
own two formats for its shards, so they reshard wherever the inner optimizer's state does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from megatron_ext.params.fsdp_shards import local_part
from megatron_ext.seams.optimizer import InnerValues, is_distributed

__all__ = [
    "ask_for_some_experts",
    "beside_optimizer",
    "beside_view",
    "is_model_key",
    "load_beside_optimizer",
    "mark_as_copy",
    "prefix_keys",
    "split_plain",
    "unstack_experts",
]

# What the distributed optimizer's formats leave out of a state: there it is a number that all parameters share.
_LEFT_OUT = frozenset({"step", "numel_unpadded"})
# Added to replica ids of ranks that read what another worker reads as well; larger than any group.
_COPY_STRIDE = 1 << 20


def is_model_key(key: str) -> bool:
    """Return whether `key` of a state dict is a model chunk: `model`, `model0`, ..."""
    return key == "model" or (key.startswith("model") and key[5:].isdigit())


def prefix_keys(entry: Any, prefix: str) -> None:
    """Put `prefix` before the name of every sharded object in `entry`, in place."""
    for item in _sharded(entry):
        item.key = f"{prefix}{item.key}"


def mark_as_copy(entry: Any, index: int) -> None:
    """Make every sharded object in `entry` the `index`-th copy of one that another worker has too, in place."""
    if index == 0:
        return
    for item in _sharded(entry):
        replica = item.replica_id
        if isinstance(replica, int):
            item.replica_id = replica + index * _COPY_STRIDE
        else:
            item.replica_id = (*replica[:-1], replica[-1] + index * _COPY_STRIDE)


def unstack_experts(entry: Any) -> None:
    """Give the tensors of every routed expert of every layer in `entry` names of their own, in place.

    Megatron names the same tensors of all experts, and of all layers, as one, of which no part may be missing. An
    optimizer that does not train all experts has parts of it alone.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for item in _sharded(entry):
        if ".mlp.experts." not in item.key:
            continue
        if isinstance(item, ShardedTensorFactory):
            item.build_fn = _unstacking(item.build_fn)
        elif isinstance(item, ShardedTensor):
            _unstack(item)


def ask_for_some_experts(entry: Any) -> None:
    """Let the request of a read in `entry` have the tensors of some routed experts of a checkpoint that has all's.

    Megatron takes it that all parts of what it names as one are asked for together, on a grid; ranges without a grid
    need not be everything.
    """
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace

    dict_list_map_inplace(_without_grid, entry)


def split_plain(entry: Any) -> Any:
    """Return the part of `entry` that is not sharded: what one rank alone would write."""
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

    kinds = (ShardedBase, LocalNonpersistentObject)
    _, plain = extract_matching_values({"entry": entry}, lambda value: isinstance(value, kinds))
    return plain.get("entry")


def beside_optimizer(
    values: InnerValues,
    tensors: dict[str, list[torch.Tensor]],
    model_state: dict[str, Any],
    metadata: dict[str, Any],
    loading: bool,
    prefix: str,
) -> list[Any]:
    """Return sharded entries for tensors next to the inner optimizer's values.

    Args:
        values: the inner values; `tensors` are in their order and shapes.
        tensors: lists by name, such as anchor and momentum.
        model_state: the model's sharded state dict, chunk by chunk.
        metadata: the content metadata, which names the distributed optimizer's format.
        loading: whether the entries are the request of a read, into which the tensors' contents do not go.
        prefix: put before every key.

    Returns:
        One entry per member optimizer.
    """
    entries: list[Any] = []
    for index, member in enumerate(values.members):
        if is_distributed(member):
            view = beside_view(member, values, tensors, index)
            kind = metadata.get("distrib_optim_sharding_type", "dp_reshardable")
            entry = getattr(view, f"sharded_param_state_{kind}")(model_state, loading, metadata)
            if kind == "dp_reshardable":
                # Keys name buckets here, not parameters, and every member counts its buckets from 0.
                prefix_keys(entry, f"member_{index}.")
        else:
            entry = _in_model_space(values, tensors, index, model_state)
        prefix_keys(entry, prefix)
        entries.append(entry)
    return entries


@torch.no_grad()
def load_beside_optimizer(
    values: InnerValues, tensors: dict[str, list[torch.Tensor]], loaded: list[Any], metadata: dict[str, Any]
) -> None:
    """Copy what was read for the request of `beside_optimizer` into `tensors`."""
    for index, member in enumerate(values.members):
        if is_distributed(member):
            kind = metadata.get("distrib_optim_sharding_type", "dp_reshardable")
            view = beside_view(member, values, tensors, index)
            getattr(view, f"load_parameter_state_from_{kind}")(loaded[index])
        else:
            for name, tensor, position in _of_member(values, tensors, index):
                tensor.copy_(loaded[index][name][position])


def _without_grid(item: Any) -> Any:
    """Return what asks for the same without a grid, if it is of an expert."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if ".mlp.experts." not in getattr(item, "key", ""):
        return item
    if isinstance(item, ShardedTensorFactory):
        build, merge = item.build_fn, item.merge_fn
    elif isinstance(item, ShardedTensor):
        build, merge = (lambda key, data, replica, flattened: {"whole": replace(item, data=data)}), _only
    else:
        return item
    shapes: list[tuple[int, ...]] = []

    def build_without_grid(*args: Any) -> Any:
        built = build(*args)
        for tensor in _sharded(built):
            shapes.append(tensor.local_shape)
            _leave_grid(tensor)
        return built

    def merge_in_shape(loaded: Any) -> Any:
        left = iter(shapes)
        return merge(dict_list_map_outplace(lambda tensor: tensor.view(next(left)), loaded))

    return ShardedTensorFactory(
        item.key, item.data, build_without_grid, merge_in_shape, item.replica_id, item.flattened_range
    )


def _only(loaded: Any) -> Any:
    (tensor,) = loaded.values()
    return tensor


def _leave_grid(tensor: Any) -> None:
    """Let the axes of layers and experts be the tensor's own, each of length 1."""
    tensor.local_shape = (1,) * tensor.prepend_axis_num + tensor.local_shape
    tensor.prepend_axis_num = 0
    tensor.axis_fragmentations = None
    if tensor.data is not None:
        tensor.data = tensor.data.view(tensor.local_shape)


def _unstacking(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a factory (of the halves of a gated MLP) whose tensors are unstacked."""

    def build_unstacked(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        for item in _sharded(built):
            _unstack(item)
        return built

    return build_unstacked


def _unstack(tensor: Any) -> None:
    """Let the axes of layers and experts, which the tensor itself does not have, be a part of its name."""
    axes = tensor.prepend_axis_num
    tensor.key = ".".join((tensor.key, *map(str, tensor.global_offset[:axes])))
    for name in ("global_shape", "global_offset", "axis_fragmentations"):
        setattr(tensor, name, getattr(tensor, name)[axes:])
    tensor.prepend_axis_num = 0


def _sharded(entry: Any) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    for item in nested_values({"entry": entry}):
        if isinstance(item, ShardedBase):
            yield item


def _of_member(
    values: InnerValues, tensors: dict[str, list[torch.Tensor]], index: int
) -> Iterator[tuple[str, torch.Tensor, int]]:
    for name, listed in tensors.items():
        for position, (value, tensor) in enumerate(zip(values.values, listed, strict=True)):
            if value.member == index:
                yield name, tensor, position


def _in_model_space(
    values: InnerValues,
    tensors: dict[str, list[torch.Tensor]],
    index: int,
    model_state: dict[str, Any],
) -> Any:
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    by_parameter = {id(item.data): item for item in _sharded(model_state)}
    entry: dict[str, dict[int, Any]] = {name: {} for name in tensors}
    for name, tensor, position in _of_member(values, tensors, index):
        parameter = values.values[position].entry.parameter
        item = make_sharded_optimizer_tensor(by_parameter[id(local_part(parameter))], tensor, prefix=name)
        if values.values[position].is_alone:
            # As Megatron does: of the model there is a copy on every data-parallel rank, of this there is one.
            item.replica_id = (*item.replica_id[:2], 0)
        entry[name][position] = item
    # A rank to which the layer-wise optimizer has given nothing: what is empty would lose its place in the list.
    return entry if all(entry.values()) else LocalNonpersistentObject(entry)


def beside_view(member: Any, values: InnerValues, tensors: dict[str, list[torch.Tensor]], index: int) -> Any:
    """Return a DistributedOptimizer with the shards of the `index`-th member whose parameters and states are `tensors`.

    Args:
        member: a `DistributedOptimizer`, the `index`-th of the values' members.
        values: the inner values; `tensors` are in their order and shapes.
        tensors: lists by name, such as anchor and momentum.
        index: of the member.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    class BesideView(DistributedOptimizer):  # type: ignore[misc]  # Megatron is untyped
        """The member's layout with other contents."""

        def __init__(self) -> None:
            self.__dict__.update(member.__dict__)

        @property
        def optimizer_state_keys(self) -> tuple[str, ...]:
            return tuple(name for name in names if name != "param")

        def _get_main_param_and_optimizer_states(self, model_param: Any) -> dict[str, torch.Tensor]:
            return dict(contents[model_param])

        def _set_main_param_and_optimizer_states(self, model_param: Any, loaded: dict[str, Any]) -> None:
            for name, tensor in contents[model_param].items():
                tensor.copy_(loaded[name])

    # The formats ask for one tensor called "param": the first of ours.
    first = next(iter(tensors))
    inside = {name: f"outer_{name}" if name in _LEFT_OUT else name for name in tensors} | {first: "param"}
    names = list(inside.values())
    contents: dict[Any, dict[str, torch.Tensor]] = {}
    for name, tensor, position in _of_member(values, tensors, index):
        parameter = values.values[position].entry.parameter
        contents.setdefault(parameter, {})[inside[name]] = tensor
    return BesideView()
