# SPDX-License-Identifier: Apache-2.0
"""Both sides of vs_atorch.py inside a rank: the averagers, their rounds' times, and the memory that they hold."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import GUARDS

if TYPE_CHECKING:
    import torch

__all__ = ["ATORCH", "OURS", "PENALTY", "PLAIN", "Memory", "Setting", "Times", "rank_memory", "rank_times"]

PLAIN, PENALTY = "plain", "penalty"
ATORCH, OURS = "atorch", "ours"

Parameters = list[tuple[str, "torch.nn.Parameter"]]
Round = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is synchronised, and how often it is measured."""

    shapes: list[tuple[int, ...]]
    """Of the model's parameters."""

    units: list[str]
    """Their units, in the same order."""

    method: str
    """PLAIN or PENALTY."""

    pairs: int
    """Measured pairs."""

    warmup: int
    """Pairs before those, not counted."""

    atorch: str
    """Folder of the packages of atorch's environment."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of every measured round on one rank."""

    atorch: list[float]
    """Of atorch's averager."""

    ours: list[float]
    """Of our averager, in the same order of pairs."""

    reduces: list[float]
    """Of a bare all-reduce of as many values, likewise."""

    copies: list[float]
    """Of a copy of as many values, at all ranks at once, likewise."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a side takes on one rank beside the model and its gradients, in bytes."""

    held: int
    """Between two rounds."""

    peak: int
    """The most during a round."""


def rank_times(setting: Setting) -> Times:
    """Run on one rank: measure all pairs.

    Raises:
        RuntimeError: the workers, or with the plain method the two sides, ended with different weights.
    """
    import torch
    import torch.distributed as dist

    from benchmarks.ranks.outer_rounds import require_equal

    _join(setting)
    models = {side: _model(setting) for side in (ATORCH, OURS)}
    rounds = {side: _start(setting, side, models[side]) for side in (ATORCH, OURS)}
    values = sum(parameter.numel() for _, parameter in models[OURS])
    flat, copied = torch.ones(values), torch.empty(values)
    seconds: dict[str, list[float]] = {ATORCH: [], OURS: [], "reduces": [], "copies": []}

    def timed(what: str, operation: Round) -> None:
        dist.barrier()
        begin = time.perf_counter()
        operation()
        seconds[what].append(time.perf_counter() - begin)

    for pair in range(setting.warmup + setting.pairs):
        # ABBA: what drifts over the pairs touches both sides alike.
        for side in (ATORCH, OURS) if pair % 2 == 0 else (OURS, ATORCH):
            _inner_steps(models[side])
            timed(side, rounds[side])
        flat.fill_(1.0)
        timed("reduces", lambda: dist.all_reduce(flat))
        timed("copies", lambda: copied.copy_(flat))
    for model in models.values():
        require_equal([parameter.detach() for _, parameter in model])
    if setting.method == PLAIN:
        for (name, theirs), (_, ours) in zip(models[ATORCH], models[OURS], strict=True):
            if not torch.allclose(theirs, ours, rtol=1e-3, atol=1e-5):
                raise RuntimeError(f"the two sides ended with different weights, first in {name}: not the same work")
    return Times(**{what: measured[setting.warmup :] for what, measured in seconds.items()})


def rank_memory(setting: Setting, side: str) -> Memory:
    """Run on one rank: measure the memory of one side."""
    _join(setting)
    model = _model(setting)
    before = _resident("RssAnon")
    round_ = _start(setting, side, model)
    for _ in range(2):
        _inner_steps(model)
        round_()
    held = _resident("RssAnon") - before
    resident = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    _inner_steps(model)
    round_()
    return Memory(held=held, peak=held + _status("VmHWM") - resident)


def _join(setting: Setting) -> None:
    """Take a rank's place: one thread, the process group, atorch within reach."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(1))  # connects the ranks
    # Last, so that everything that this Python has as well is this Python's.
    sys.path.append(setting.atorch)
    import atorch.local_sgd.DDP  # noqa: F401  # on both sides, before memory is measured


def _model(setting: Setting) -> Parameters:
    """Return equal parameters on all ranks, with gradients."""
    import torch

    torch.manual_seed(0)
    parameters = []
    for index, (shape, unit) in enumerate(zip(setting.shapes, setting.units, strict=True)):
        parameter = torch.nn.Parameter(torch.randn(shape).mul_(0.02))
        # atorch synchronises only what has a gradient.
        parameter.grad = torch.zeros_like(parameter)
        parameters.append((f"{unit}.{index}", parameter))
    return parameters


def _inner_steps(model: Parameters) -> None:
    """Do what an interval of inner steps did: every worker moved by another, small amount."""
    import torch
    import torch.distributed as dist

    with torch.no_grad():
        for _, parameter in model:
            parameter.mul_(1 + 1e-3 * (dist.get_rank() + 1))


def _start(setting: Setting, side: str, model: Parameters) -> Round:
    """Return what makes a round of a side over a model, after a first one in which nothing had moved."""
    round_ = _atorch_round(setting, model) if side == ATORCH else _our_round(setting, model)
    # It is in this call that atorch remembers the weights as its anchor.
    round_()
    return round_


def _atorch_round(setting: Setting, model: Parameters) -> Round:
    import torch
    from atorch.local_sgd.configs import GTAConfig, LocalSGDConfig, OuterOptimizerConfig
    from atorch.local_sgd.DDP import OuterOptimPeriodicModelAverager

    guarded = setting.method == PENALTY
    averager = OuterOptimPeriodicModelAverager(
        local_sgd_config=LocalSGDConfig(local_sgd_sync_interval=1, **(GUARDS if guarded else {})),
        # Without a reducer it ignores that workers are to be weighted.
        gta_config=GTAConfig(reducer="linear" if guarded else None),
        outer_optim_config=OuterOptimizerConfig(
            outer_optim_class=torch.optim.SGD, outer_optim_kwargs={"lr": 0.7, "momentum": 0.9, "nesterov": True}
        ),
    )
    parameters = [parameter for _, parameter in model]
    return lambda: averager.average_parameters(parameters)


def _our_round(setting: Setting, model: Parameters) -> Round:
    from megatron_ext.local_sgd import LocalSGDConfig, OuterOptimizerConfig
    from megatron_ext.local_sgd.plain_torch import OuterOptimPeriodicModelAverager

    averager = OuterOptimPeriodicModelAverager(
        local_sgd_config=LocalSGDConfig(
            local_sgd_sync_interval=1,
            **(GUARDS if setting.method == PENALTY else {}),
        ),
        outer_optim_config=OuterOptimizerConfig(outer_optimizer_lr=0.7, outer_optimizer_momentum=0.9),
    )
    averager.attach(model)
    return averager.average_parameters


def _resident(entry: str) -> int:
    """Return a resident size in bytes, without what the C library keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status(entry)


def _status(entry: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == entry:
            return 1024 * int(value.split()[0])
    raise RuntimeError(f"/proc/self/status has no {entry}")
