# SPDX-License-Identifier: Apache-2.0
"""Counting what crosses between workers, at the collectives themselves."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.patching import Patch

__all__ = ["Traffic", "TrafficMeter"]

# How each function names the tensors whose size is its volume; () for those that carry none.
_COLLECTIVES: dict[str, tuple[str, ...]] = {
    "all_reduce": ("tensor",),
    "all_reduce_coalesced": ("tensors",),
    "reduce": ("tensor",),
    "broadcast": ("tensor",),
    "reduce_scatter": ("input_list",),
    "reduce_scatter_tensor": ("input",),
    "all_gather": ("tensor_list",),
    "all_gather_into_tensor": ("output_tensor",),
    "all_gather_coalesced": ("output_tensor_lists",),
    "gather": ("tensor",),
    "scatter": ("tensor",),
    "all_to_all": ("input_tensor_list",),
    "all_to_all_single": ("input",),
    "barrier": (),
    "monitored_barrier": (),
}
_SENDS = {"send": "dst", "isend": "dst"}


@dataclass
class Traffic:
    """Calls and bytes of one kind."""

    calls: int = 0
    """Number of calls."""

    bytes: int = 0
    """Sum of the volumes: of a collective the larger side on this rank, of a send its tensor."""


@dataclass
class TrafficMeter:
    """Counts the collectives and sends of this rank by whether they cross workers."""

    worker_of: Sequence[int]
    """The worker of every global rank."""

    crossing: dict[str, Traffic] = field(default_factory=dict)
    """What crossed workers, by function name."""

    inside: dict[str, Traffic] = field(default_factory=dict)
    """What stayed inside this rank's worker, by function name."""

    def patches(self) -> list[Patch]:
        """Return one patch per function of torch.distributed; apply them to start counting."""
        return [
            Patch(
                name=f"traffic/{name}",
                target=f"torch.distributed.distributed_c10d:{name}",
                wrap=functools.partial(self._wrap, name),
                distribution="torch",
                versions=">=2.6",
                reason="count what crosses between workers",
            )
            for name in (*_COLLECTIVES, *_SENDS)
        ]

    def reset(self) -> None:
        """Set all counts to zero."""
        self.crossing.clear()
        self.inside.clear()

    @property
    def crossing_calls(self) -> int:
        """Calls that crossed workers."""
        return sum(traffic.calls for traffic in self.crossing.values())

    @property
    def crossing_bytes(self) -> int:
        """Bytes that crossed workers."""
        return sum(traffic.bytes for traffic in self.crossing.values())

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._count(name, signature.bind(*args, **kwargs).arguments)
            return original(*args, **kwargs)

        return counted

    def _count(self, name: str, given: dict[str, Any]) -> None:
        group: Any = given.get("group") or dist.group.WORLD
        if name in _SENDS:
            peer = given.get(_SENDS[name])
            if peer is None:
                peer = dist.get_global_rank(group, given["group_dst"])
            ranks = [dist.get_rank(), int(peer)]
            size = _nbytes(given["tensor"])
        else:
            ranks = dist.get_process_group_ranks(group)
            size = sum(_nbytes(given.get(argument)) for argument in _COLLECTIVES[name])
        crosses = len({self.worker_of[rank] for rank in ranks}) > 1
        traffic = (self.crossing if crosses else self.inside).setdefault(name, Traffic())
        traffic.calls += 1
        traffic.bytes += size


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_nbytes(item) for item in value)
    return 0
