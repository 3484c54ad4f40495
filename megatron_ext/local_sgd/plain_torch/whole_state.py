# SPDX-License-Identifier: Apache-2.0
"""Local SGD's state as one object for all ranks, in whole tensors, which any number of shards can load.

A rank's own state has its shards of tensors. Here a worker's ranks put them together by the layouts of the parameters,
which the tensors share, and the first rank takes what every worker has of its own beside what all have alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.errors import UserError
from megatron_ext.outer.digest import tensor_digest
from megatron_ext.transport.collectives import collective_device

__all__ = ["WholeLayout", "gather_workers", "of_worker", "send_inside"]

_KIND = "local SGD's whole state"
_OTHER = [-1, -1]
"""A digest that no tensor has."""


class WholeLayout:
    """The whole tensors of which a rank holds shards."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take the parameters.

        Args:
            parameters: by name, in the order of the values that local SGD moves; DTensors are cut over the worker's
                ranks, others are whole on each.

        Raises:
            UserError: a parameter is cut in a way that torch cannot repeat from its whole values.
        """
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.placement_types import Replicate, Shard

        self._parameters = dict(parameters)
        for name, parameter in parameters.items():
            if not isinstance(parameter, DTensor):
                continue
            others = [each for each in parameter.placements if type(each) not in (Shard, Replicate)]
            if others:
                raise UserError(
                    f"full_state_dict: parameter {name} is cut as {others[0]}, which is not put together to whole "
                    "tensors; use full_state_dict=False, with as many ranks as save"
                )

    @property
    def shapes(self) -> dict[str, list[int]]:
        """By name, the shapes of the whole tensors."""
        return {name: list(parameter.shape) for name, parameter in self._parameters.items()}

    def whole(
        self, states: Mapping[str, Sequence[torch.Tensor]], *, keep: bool, device: torch.device | None
    ) -> dict[str, list[torch.Tensor]]:
        """Put shards together; all ranks of a worker must call it.

        Args:
            states: by name, this rank's shards in the order of the parameters.
            keep: whether this rank wants the result, which is empty without; never more than one tensor is in memory.
            device: where the result is kept; None where the shards are.
        """
        found: dict[str, list[torch.Tensor]] = {}
        for kind, shards in states.items():
            for parameter, shard in zip(self._parameters.values(), shards, strict=True):
                value = self._joined(parameter, shard)
                if keep:
                    found.setdefault(kind, []).append(value if device is None else value.to(device))
        return found

    def _joined(self, like: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        if not isinstance(like, DTensor):
            return shard
        shard = shard.to(like.to_local().device)  # it may be on the host, where a GPU's backend cannot send it from
        whole = DTensor.from_local(
            shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return whole.full_tensor()

    def cut(self, place: int, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's shard.

        Args:
            place: which parameter's.
            value: the whole tensor.
        """
        from torch.distributed.tensor import DTensor, distribute_tensor

        like = list(self._parameters.values())[place]
        if not isinstance(like, DTensor):
            return value
        value = value.to(like.to_local().device)
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).to_local().clone()

    @torch.no_grad()
    def digests(self) -> dict[str, list[int]]:
        """Return by name a digest of every parameter's present whole values; all ranks of a worker must call it."""
        return {
            name: list(tensor_digest([self._joined(parameter, _local(parameter))]))
            for name, parameter in self._parameters.items()
        }

    def fitted(self, weights: Mapping[str, Any], local: Mapping[str, list[int]]) -> dict[str, Any]:
        """Return digests of this rank's shards for those of whole tensors; all ranks of a worker must call it.

        Args:
            weights: digests of the whole tensors that a state belongs to.
            local: digests of the present shards, which stand for what they are part of.
        """
        now = self.digests()
        return {
            name: local[name] if name in local and list(digest) == now[name] else _OTHER
            for name, digest in weights.items()
        }


def _local(parameter: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def gather_workers(mine: Mapping[str, Any], across: Any, *, is_writer: bool) -> dict[str, Any]:
    """Return what is written: what all workers have alike, and what each has of its own.

    Args:
        mine: a worker's state in whole tensors.
        across: the group of the first ranks of all workers, which must all call it.
        is_writer: whether this rank is the first worker's; the others get nothing.
    """
    apart = {name: value for name, value in mine.items() if name != "common"}
    everyone: list[Any] | None = [None] * dist.get_world_size(across) if is_writer else None
    dist.gather_object(apart, everyone, dst=dist.get_global_rank(across, 0), group=across)
    return {"kind": _KIND, "common": mine["common"], "workers": everyone} if everyone is not None else {}


def of_worker(whole: Any, worker: int, workers: int, where: str) -> dict[str, Any]:
    """Return a worker's state from what `gather_workers` returned.

    Args:
        whole: what was read.
        worker: its number.
        workers: how many there are; where others have saved, each gets the first one's.
        where: the file, for the message.

    Raises:
        UserError: it is no such state.
    """
    if not isinstance(whole, dict) or whole.get("kind") != _KIND:
        raise UserError(f"{where}: it was not saved with full_state_dict=True; load it as it was saved")
    saved = whole["workers"]
    return {**saved[worker if len(saved) == workers else 0], "common": whole["common"]}


def send_inside(
    state: dict[str, Any] | None, inside: Any, cut: Callable[[int, torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """Send a worker's state from its first rank to the others, each of which keeps its shards; all must call it.

    Args:
        state: in whole tensors, on the first rank; None on the others.
        inside: the group of the worker's ranks.
        cut: returns this rank's shard of the tensor at a place.
    """
    source, device = dist.get_global_rank(inside, 0), collective_device(inside)
    outline = None
    if state is not None:
        outline = {
            **state,
            **{
                part: {kind: [(value.shape, value.dtype) for value in state[part][kind]] for kind in state[part]}
                for part in ("common", "own")
            },
        }
    sent = [outline]
    dist.broadcast_object_list(sent, src=source, group=inside)
    assert sent[0] is not None
    received: dict[str, Any] = dict(sent[0])
    for part in ("common", "own"):
        for kind, entries in received[part].items():
            for place, (shape, dtype) in enumerate(entries):
                whole = torch.empty(shape, dtype=dtype, device=device) if state is None else state[part][kind][place]
                whole = whole.to(device).contiguous()
                dist.broadcast(whole, src=source, group=inside)
                entries[place] = cut(place, whole)
    return received
