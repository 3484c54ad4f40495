# SPDX-License-Identifier: Apache-2.0
"""What an averager has of the module whose parameters it averages, all of which ranks check together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.engine import LocalSGD, SyncedTensor
from megatron_ext.local_sgd.plain_torch.agreed import Settings
from megatron_ext.local_sgd.plain_torch.buffers import SharedBuffers, plans_for_buffers, refuse_unfit_buffers
from megatron_ext.local_sgd.plain_torch.forward_hooks import ForwardHooks, layers_of
from megatron_ext.local_sgd.plain_torch.parameters import is_first_copy, local_part, require_all_within, unit_of
from megatron_ext.local_sgd.plain_torch.replaced_weights import ReplacedWeights
from megatron_ext.local_sgd.plain_torch.same_model import ModelDescription, describe, require_same_model
from megatron_ext.local_sgd.plain_torch.saved_state import StateGuard
from megatron_ext.local_sgd.streaming import fragment_problem, layer_count

__all__ = ["Attached", "attach_to"]


@dataclass(frozen=True, kw_only=True)
class Attached:
    """The engine over a module's parameters, and what watches the module."""

    engine: LocalSGD
    """Runs the rounds."""

    parameters: dict[str, torch.Tensor]
    """What was given to average, by name, in the order of the engine's values."""

    guard: StateGuard
    """Looks at states that are loaded."""

    hooks: ForwardHooks | None
    """Ends rounds in forward passes, with `sync_in_forward`."""

    buffers: SharedBuffers | None
    """Makes buffers equal where workers meet, if there are several and that was asked for."""

    replaced: ReplacedWeights | None
    """Notices weights that something else than training has replaced, if there are several workers."""


def attach_to(
    named: Mapping[str, torch.Tensor],
    model: torch.nn.Module | None,
    inner: torch.optim.Optimizer | None,
    *,
    settings: Settings,
    across: Any,
    inside: Any,
    observe: bool,
    land: Callable[[Sequence[str]], None],
    say: Callable[[str], None],
) -> Attached:
    """Build what averages parameters, and check that all ranks have the same model; all of them must call it.

    Args:
        named: the parameters by name, in the model's order.
        model: the module that has them, if it is known.
        inner: the optimizer that trains them, if it is known.
        settings: the averager's, on which ranks have agreed.
        across: process group of the ranks that hold the same values, one per worker, in worker order.
        inside: process group of all ranks of this worker; None when it is this one alone.
        observe: whether rounds are measured for a log.
        land: waits until the results of units are among the parameters.
        say: prints a line.

    Raises:
        UserError: one is not fp32, there are more fragments than layers, the module is missing or lacks a parameter,
            or the workers' models differ; on all ranks.
    """
    is_alone = settings.trains_alone
    share = settings.buffers == "average"
    described, problems = ModelDescription(), []
    try:
        synced, units, layers = _synced(named, model, settings, inside)
        engine = LocalSGD(
            synced,
            units=units,
            config=settings.config,
            outer=settings.outer,
            gta=settings.gta,
            across=across,
            inside=inside,
            streaming=settings.streaming,
            observe=observe,
        )
        compared = inner if settings.inner_optimizers == "same" else None
        described = describe(named, model, units, share, compared)
        if model is not None and not is_alone:
            refuse_unfit_buffers(model, across, share, settings.apart, settings.config.use_async)
    except UserError as error:
        problems.append(str(error))
    require_same_model(described, problems, across, inside)
    guard = StateGuard(
        synced,
        units=units,
        config=settings.config,
        outer=settings.outer,
        gta=settings.gta,
        streaming=settings.streaming,
        across=across,
        inside=inside,
    )
    hooks = buffers = replaced = None
    if model is not None and settings.config.sync_in_forward:
        hooks = ForwardHooks(model, units, layers, land, across)
    if model is not None and not is_alone:
        for line in plans_for_buffers(model, across, share):
            say(line)
        buffers = SharedBuffers(model, across) if share else None
    if not is_alone:
        # After the hooks above, which refuse to load what is in flight.
        replaced = ReplacedWeights(
            synced,
            model=model,
            inner=inner,
            across=across,
            inside=inside,
            is_anchored=lambda: not engine.in_warmup,
            say=say,
        )
    return Attached(
        engine=engine, parameters=dict(named), guard=guard, hooks=hooks, buffers=buffers, replaced=replaced
    )


def _synced(
    named: Mapping[str, torch.Tensor], model: torch.nn.Module | None, settings: Settings, inside: Any
) -> tuple[list[SyncedTensor], list[str], dict[str, torch.nn.Module]]:
    """Return what rounds move, its units in order, and by unit the layers that wait for it in the forward pass.

    Raises:
        UserError: see `attach_to`.
    """
    synced = []
    for name, parameter in named.items():
        if parameter.dtype != torch.float32:
            raise UserError(
                f"parameter {name} is {parameter.dtype}; local SGD averages fp32 parameters: keep them in fp32 and "
                "compute in another type (torch.autocast, FSDP2's MixedPrecisionPolicy)"
            )
        counted = inside is None or is_first_copy(parameter, inside)
        synced.append(SyncedTensor(tensor=local_part(parameter), name=name, unit=unit_of(name), counted=counted))
    units = list(dict.fromkeys(entry.unit for entry in synced))
    layers: dict[str, torch.nn.Module] = {}
    if settings.config.sync_in_forward:
        if model is None:
            raise UserError(
                "sync_in_forward needs the module whose forward pass brings rounds to their end; give it, as in "
                "StatefulPostLocalSGDOptimizer(optim, averager, model)"
            )
        require_all_within(named, model)
        layers = layers_of(model)
        units.sort(key=lambda unit: unit in layers)
    problem = fragment_problem(settings.streaming.fragments, layer_count(units), "the model's layers")
    if problem is not None:
        raise UserError(problem)
    return synced, units, layers
