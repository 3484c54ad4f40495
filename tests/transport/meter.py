# SPDX-License-Identifier: Apache-2.0
"""The traffic meter as an instrument of `run_pretrain`: two workers, one count per training step."""

from __future__ import annotations

from typing import Any

__all__ = ["crossing_bytes", "crossing_calls", "install_meter"]

_steps: list[tuple[int, int]] = []


def install_meter() -> None:
    """Count what crosses between two workers from the end of one iteration to the end of the next.

    The first count leaves out what comes before the first forward pass.
    """
    import functools
    import os

    import megatron.training.training as training

    from megatron_ext.patching import PatchRegistry
    from megatron_ext.transport.traffic import TrafficMeter

    world = int(os.environ["WORLD_SIZE"])
    meter = TrafficMeter(worker_of=[0] * world)
    PatchRegistry().apply(meter.patches())
    train_step, decide = training.train_step, training.checkpoint_and_decide_exit

    @functools.wraps(train_step)
    def first(*args: Any, **kwargs: Any) -> Any:
        if not _steps:
            meter.worker_of = _workers(world)
            meter.reset()
        return train_step(*args, **kwargs)

    @functools.wraps(decide)
    def last(*args: Any, **kwargs: Any) -> Any:
        result = decide(*args, **kwargs)
        _steps.append((meter.crossing_calls, meter.crossing_bytes))
        meter.reset()
        return result

    training.train_step, training.checkpoint_and_decide_exit = first, last


def crossing_calls(model: Any, optimizer: Any, args: Any) -> list[int]:
    """Probe: calls that crossed workers, step by step."""
    return [calls for calls, _ in _steps]


def crossing_bytes(model: Any, optimizer: Any, args: Any) -> list[int]:
    """Probe: bytes that crossed workers, step by step."""
    return [size for _, size in _steps]


def _workers(world: int) -> list[int]:
    """Return the worker of every rank when two workers share the data-parallel dimension."""
    from megatron.core import parallel_state

    size = parallel_state.get_data_parallel_world_size()
    model_ranks = world // size // parallel_state.get_pipeline_model_parallel_world_size()
    return [(rank // model_ranks) % size * 2 // size for rank in range(world)]
