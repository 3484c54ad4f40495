# SPDX-License-Identifier: Apache-2.0
"""Checks that all workers attach the same model, and start from the same values of what no round moves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ext.local_sgd.agreement import (
    canonical,
    differences,
    gather_all,
    gather_objects,
    refuse_together,
    workers_in_words,
)
from megatron_ext.local_sgd.plain_torch.buffers import persistent_buffers
from megatron_ext.local_sgd.plain_torch.inner_optimizers import inner_problems, settings_by_parameter
from megatron_ext.local_sgd.plain_torch.parameters import local_part
from megatron_ext.outer.digest import tensor_digest

__all__ = ["ModelDescription", "describe", "require_same_model"]


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """What a rank attaches."""

    parameters: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """Name and local shape of every synced parameter, in order."""

    trained: dict[str, str] = field(default_factory=dict)
    """By parameter of the optimizer and the module, whether it requires gradients."""

    buffers: dict[str, str] = field(default_factory=dict)
    """By persistent buffer, its dtype and shape."""

    inner: str = "not compared"
    """The class of the inner optimizer."""

    settings: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """By parameter, the inner optimizer's settings."""

    values: dict[str, str] = field(default_factory=dict)
    """By name, digests of what must be equal though no round moves it, or moves it from the start."""

    units: list[str] = field(default_factory=list)
    """The units of the penalty in order, which all ranks of a worker must have."""


def describe(
    named: Mapping[str, torch.Tensor],
    model: torch.nn.Module | None,
    units: Sequence[str],
    share_buffers: bool,
    inner: torch.optim.Optimizer | None,
) -> ModelDescription:
    """Describe what a rank attaches.

    Args:
        named: the synced parameters.
        model: the module, if it was given.
        units: of the parameters.
        share_buffers: whether workers must begin with equal buffers.
        inner: the inner optimizer, if it is to be compared.
    """
    buffers = {} if model is None else persistent_buffers(model)
    others = {} if model is None else dict(model.named_parameters())
    frozen = {name: local_part(value) for name, value in others.items() if not value.requires_grad}
    alike = {f"parameter {name}, which is not trained,": value for name, value in frozen.items() if name not in named}
    if share_buffers:
        alike.update((f"buffer {name}", buffer) for name, buffer in buffers.items())
    return ModelDescription(
        parameters=[(name, tuple(local_part(parameter).shape)) for name, parameter in named.items()],
        trained={
            f"requires_grad of parameter {name}": str(value.requires_grad)
            for name, value in {**others, **named}.items()
        },
        buffers={f"buffer {name}": f"{buffer.dtype} of shape {list(buffer.shape)}" for name, buffer in buffers.items()},
        inner="not compared" if inner is None else canonical(type(inner)),
        settings={} if inner is None else settings_by_parameter(inner, named),
        values={name: str(tensor_digest([value])) for name, value in alike.items()},
        units=list(units),
    )


def require_same_model(described: ModelDescription, problems: Sequence[str], across: Any, inside: Any) -> None:
    """Check that workers mean the same by their models; all ranks must call it.

    Args:
        described: what this rank attaches.
        problems: those of this rank by itself; `described` does not count then.
        across: process group of the ranks that hold the same values, one per worker, in worker order.
        inside: process group of all ranks of this worker; None when it is this one alone.

    Raises:
        UserError: they do not, or a rank has a problem; on all ranks.
    """
    mine = list(problems)
    theirs = gather_objects((described, mine), across)
    if not any(problems for _, problems in theirs):
        mine = _problems([each for each, _ in theirs])
    everyone = gather_all((mine, described.units), across, inside)
    if not any(problems for of_worker in everyone for problems, _ in of_worker):
        mine = _problems_inside([[units for _, units in of_worker] for of_worker in everyone])
    refuse_together([[problems for problems, _ in of_worker] for of_worker in everyone], mine)


def _problems(described: Sequence[ModelDescription]) -> list[str]:
    """Return what differs among workers; the same on all of them."""
    for worker, theirs in enumerate(described):
        if theirs.parameters != described[0].parameters:
            pairs = itertools.zip_longest(described[0].parameters, theirs.parameters)
            first, other = next((a, b) for a, b in pairs if a != b)
            return [
                f"the workers' parameters differ: {_shown(first)} on worker 0 is {_shown(other)} on worker {worker}; "
                "build model and optimizer alike on all of them, and give StatefulPostLocalSGDOptimizer the model"
            ]
    found = differences([each.trained for each in described], workers_in_words, "train the same ones on all workers")
    found += differences([each.buffers for each in described], workers_in_words, "build the model alike on all workers")
    found = found or inner_problems([each.inner for each in described], [each.settings for each in described])
    found = found or _value_problems([each.values for each in described])
    more = f" (and {len(found) - 1} more differences of the models)" if len(found) > 1 else ""
    return [found[0] + more] if found else []


def _value_problems(values: Sequence[Mapping[str, str]]) -> list[str]:
    """Return what has other values on some workers than on the first one, given digests by name."""
    found = []
    for name, expected in values[0].items():
        others = [worker for worker, theirs in enumerate(values) if theirs.get(name) != expected]
        if others:
            way_out = ", or leave every worker its own (buffers='own')" if name.startswith("buffer ") else ""
            found.append(
                f"{name} has other values on {workers_in_words(others)} than on worker 0; load the same weights on all "
                f"workers before the optimizer is wrapped{way_out}. Values of each worker's own, saved in the middle "
                "of an interval, are loaded afterwards"
            )
    return found


def _problems_inside(units: Sequence[Sequence[list[str]]]) -> list[str]:
    """Return what differs among the ranks of a worker, given every rank's units."""
    for worker, of_worker in enumerate(units):
        for rank, theirs in enumerate(of_worker):
            if theirs != of_worker[0]:
                return [
                    f"the ranks of worker {worker} have parameters of other layers: {', '.join(theirs)} on rank "
                    f"{rank}, {', '.join(of_worker[0])} on rank 0; all ranks of a worker need every layer"
                ]
    return []


def _shown(parameter: tuple[str, tuple[int, ...]] | None) -> str:
    return "none" if parameter is None else f"{parameter[0]} of shape {list(parameter[1])}"
