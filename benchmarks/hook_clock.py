# SPDX-License-Identifier: Apache-2.0
"""Instruments for one rank of a local-SGD run: time spent in our wrappers, and collectives that cross workers."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ext.patching import Patch

__all__ = ["HookClock", "StepCounts", "install", "step_counts"]


class HookClock:
    """Adds up the time in wrappers, without the time in what they wrap."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False
        self._since = 0.0

    def wrapper(self, wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a `Patch.wrap` that does the same with the clock running in its code alone.

        A patch that replaces something else than a function is left alone: its cost is in look-ups of attributes.
        """

        def timed(original: Any) -> Any:
            if not inspect.isfunction(original):
                return wrap(original)
            return self._running(True, wrap(self._running(False, original)))

        return timed

    def _running(self, inside: bool, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = self._inside
            self._switch(inside)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch(before)

        return call

    def _switch(self, inside: bool) -> None:
        now = time.perf_counter()
        if self._inside:
            self.seconds += now - self._since
        self._inside, self._since = inside, now


@dataclass(kw_only=True)
class StepCounts:
    """What the instruments saw, step by step; a step ends where the next one starts."""

    hook_seconds: list[float] = field(default_factory=list)
    """Time in the wrappers of local SGD."""

    crossing_calls: list[int] = field(default_factory=list)
    """Collectives and sends that crossed workers."""


_counts = StepCounts()


def install() -> None:
    """Instrument this process; call it before the training script patches Megatron."""
    from megatron.training import training

    from megatron_ext.patching import PatchRegistry
    from megatron_ext.transport.traffic import TrafficMeter

    clock = HookClock()
    _time_patches(clock)
    meter = TrafficMeter(worker_of=())
    train_step = training.train_step
    started = 0

    @functools.wraps(train_step)
    def observed(*args: Any, **kwargs: Any) -> Any:
        nonlocal started
        started += 1
        if started == 1:
            meter.worker_of = _workers()
            PatchRegistry().apply(meter.patches())
        elif started > 2:
            # What ended last is the second step or a later one: Megatron prints a log line after the first.
            _counts.hook_seconds.append(clock.seconds)
            _counts.crossing_calls.append(meter.crossing_calls)
        clock.seconds = 0.0
        meter.reset()
        return train_step(*args, **kwargs)

    training.train_step = observed


def step_counts(model: Any, optimizer: Any, args: Any) -> StepCounts:
    """Probe: what the instruments saw of all steps but the first and the last."""
    return _counts


def _time_patches(clock: HookClock) -> None:
    """Let local SGD's patches be applied with the clock around their code.

    Repairs of Megatron are left alone: they are in force already where every run on this backend needs them.
    """
    from megatron_ext.local_sgd.feature import LocalSGDFeature

    patches = LocalSGDFeature.required_patches

    def timed(feature: LocalSGDFeature) -> list[Patch]:
        return [
            patch if patch.name.startswith("repairs/") else replace(patch, wrap=clock.wrapper(patch.wrap))
            for patch in patches(feature)
        ]

    setattr(LocalSGDFeature, "required_patches", timed)  # noqa: B010  # in a process of its own; mypy sees a method


def _workers() -> list[int]:
    """Return the worker of every rank."""
    import torch.distributed as dist

    from megatron_ext.seams.process_groups import current_groups

    workers: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(workers, current_groups().worker)
    return [worker for worker in workers if worker is not None]
