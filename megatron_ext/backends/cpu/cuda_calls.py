# SPDX-License-Identifier: Apache-2.0
"""What the calls into `torch.cuda` mean on a machine that computes on the CPU."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

from megatron_ext.backends.cpu.device_placement import TORCH_VERSIONS
from megatron_ext.patching import Patch

__all__ = ["CpuEvent", "CpuStream", "patches"]

_CPU = torch.device("cpu")


class CpuStream:
    """Stands for `torch.cuda.Stream`: all work is done when a call returns, so there is nothing to order."""

    device = _CPU
    cuda_stream = 0
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept what the CUDA class accepts."""

    def __enter__(self) -> CpuStream:
        """Return the stream itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave errors alone."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return (lowest, highest) priority: there is only one."""
        return (0, 0)

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return that all work is done."""
        return True

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Return `event`, or a new one, recorded now."""
        event = event or CpuEvent()
        event.record()
        return event


class CpuEvent:
    """Stands for `torch.cuda.Event`: a point in wall-clock time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept what the CUDA class accepts."""
        self._at = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        """Remember the present time."""
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return that the event has happened."""
        return True

    def elapsed_time(self, end: CpuEvent) -> float:
        """Return the milliseconds from this event to `end`."""
        return (end._at - self._at) * 1000.0


_ONLY_STREAM = CpuStream()


def patches() -> tuple[Patch, ...]:
    """Return the records of this module, always the same objects."""
    return _PATCHES


def _resident_bytes(*args: Any, **kwargs: Any) -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_resident_bytes(*args: Any, **kwargs: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_stats(*args: Any, **kwargs: Any) -> dict[str, int]:
    stats: dict[str, int] = defaultdict(int)
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{kind}.all.current"] = _resident_bytes()
        stats[f"{kind}.all.peak"] = _peak_resident_bytes()
    return stats


def _device_properties(*args: Any, **kwargs: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name="cpu",
        major=0,
        minor=0,
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        multi_processor_count=os.cpu_count() or 1,
    )


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _call(attribute: str, replacement: Callable[..., Any], reason: str, *, module: str = "torch.cuda") -> Patch:
    """Return a patch that puts a plain function in place of `module.attribute`."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return replacement(*args, **kwargs)

        return stand_in

    return _record(attribute, wrap, reason, module)


def _class(attribute: str, replacement: type, reason: str) -> Patch:
    return _record(attribute, lambda original: replacement, reason, "torch.cuda")


def _record(attribute: str, wrap: Callable[[Any], Any], reason: str, module: str) -> Patch:
    return Patch(
        name=f"cpu/{module}.{attribute}",
        target=f"{module}:{attribute}",
        wrap=wrap,
        reason=reason,
        versions=TORCH_VERSIONS,
        distribution="torch",
    )


_QUIET = "There is no device that the call could act on."
_STREAM = "Work on the CPU is done when the call returns, so streams order nothing."
_MEMORY = "Memory figures in logs are those of the process."

_PATCHES = (
    _call("current_device", lambda: _CPU, "Megatron places tensors with device=torch.cuda.current_device()."),
    _call("is_available", lambda: False, "A run forced onto the CPU must not touch the GPUs of the machine."),
    _call("device_count", lambda: 1, "Megatron builds its process groups only where a device is counted."),
    _call("get_device_name", lambda *a, **k: "cpu", "Energy and straggler reports name the device."),
    _call("get_device_properties", _device_properties, "Start-up reads the properties of the device."),
    _call("get_device_capability", lambda *a, **k: (0, 0), "Kernel choices ask for the compute capability."),
    _call("set_device", _nothing, _QUIET),
    _call("synchronize", _nothing, _QUIET),
    _call("empty_cache", _nothing, _QUIET),
    _call("ipc_collect", _nothing, _QUIET),
    _call("set_stream", _nothing, _STREAM),
    _call("current_stream", lambda *a, **k: _ONLY_STREAM, _STREAM),
    _call("default_stream", lambda *a, **k: _ONLY_STREAM, _STREAM),
    _call("stream", lambda *a, **k: contextlib.nullcontext(), _STREAM),
    _call("is_current_stream_capturing", lambda: False, "No CUDA graph is ever being captured."),
    _class("Stream", CpuStream, _STREAM),
    _class("Event", CpuEvent, "Timers record events; they measure wall-clock time."),
    _call("memory_allocated", _resident_bytes, _MEMORY),
    _call("memory_reserved", _resident_bytes, _MEMORY),
    _call("device_memory_used", _resident_bytes, _MEMORY),
    _call("max_memory_allocated", _peak_resident_bytes, _MEMORY),
    _call("max_memory_reserved", _peak_resident_bytes, _MEMORY),
    _call("memory_stats", _memory_stats, _MEMORY),
    _call("reset_peak_memory_stats", _nothing, "The peak of a process cannot be reset."),
    _call("range_push", _nothing, _QUIET, module="torch.cuda.nvtx"),
    _call("range_pop", _nothing, _QUIET, module="torch.cuda.nvtx"),
    _call("mark", _nothing, _QUIET, module="torch.cuda.nvtx"),
)
