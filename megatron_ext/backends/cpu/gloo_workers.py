# SPDX-License-Identifier: Apache-2.0
"""Process groups of gloo with one worker thread each, and one thread for the sockets of all; torch makes three each.

Each worker writes the names of the operations that it begins and ends into strings of the group, and nothing guards
them (`runLoop` in ProcessGroupGloo.cpp; seen with torch 2.13). A name of 16 letters or more lies on the heap, as
ALLGATHER_COALESCED does, which is how the distributed optimizer gathers parameters. So two operations of one group that
end together may free one string twice, and the process dies, or worse, some time later: gathering and reducing with
overlap killed a pipeline with virtual stages once in some thousand iterations.

One worker takes the group's operations in the order in which they were asked for, as NCCL does.

A device of gloo has a thread that waits for its sockets and wakes up a hundred times a second. Torch makes a device for
every group, and a rank of Megatron has some thirty groups: on a machine where ranks share processors, which is where
people try a layout, those threads took 8 % of the processors' time. All groups of a process can have one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_ext.backends.cpu.device_placement import TORCH_VERSIONS
from megatron_ext.patching import Patch

__all__ = ["patches"]

_GLOO: Any = dist.ProcessGroupGloo

_INTERFACES = "GLOO_SOCKET_IFNAME"
"""Torch's own variable: the network interfaces to use, with commas between them."""


def patches() -> tuple[Patch, ...]:
    """Return the records of this module, always the same objects."""
    return _PATCHES


def _with_few_threads(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        # The other form takes options, in which the caller has chosen how many.
        if (args and not isinstance(args[0], timedelta)) or "options" in kwargs:
            return original(self, store, rank, size, *args, **kwargs)
        options = _GLOO._Options()
        if args or "timeout" in kwargs:
            options._timeout = args[0] if args else kwargs["timeout"]
        options._devices = _devices(os.environ.get(_INTERFACES, ""), os.getpid())
        options._threads = 1
        return original(self, store, rank, size, options)

    return __init__


@functools.cache
def _devices(names: str, process: int) -> list[Any]:
    """Return the devices that torch would choose, once for all groups.

    Args:
        names: of the interfaces, or none.
        process: its number, since a device's thread stays behind in a fork.
    """
    if not names:
        return [_GLOO.create_default_device()]
    return [_GLOO.create_device(interface=name) for name in names.split(",")]


_PATCHES = (
    Patch(
        name="cpu/gloo-workers",
        target="torch.distributed.distributed_c10d:ProcessGroupGloo.__init__",
        wrap=_with_few_threads,
        reason="The two workers of a gloo group write into one string without a lock, which corrupts the heap when a "
        "coalesced gather and another operation end together; a thread per group that waits for sockets takes time.",
        versions=TORCH_VERSIONS,
        distribution="torch",
    ),
)
