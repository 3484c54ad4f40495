# SPDX-License-Identifier: Apache-2.0
"""What is refused about another package's outer optimizer before a run begins, as far as small anchors show it."""

from __future__ import annotations

from typing import Any

import torch

from megatron_ext.outer.class_checks import claim_problems, missing_problems
from megatron_ext.outer.optimizers.base import OPTIONS, TAKEN, OuterOptimizer
from megatron_ext.outer.places import Where

__all__ = ["optimizer_problems"]

_NUMEL = 24
_VALUES = {"lr": 0.1, "momentum": 0.9, "nesterov": True}


def optimizer_problems(name: str, kind: Any) -> list[str]:
    """Return what keeps an object from being the outer optimizer of a name, one sentence each."""
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        return []  # tried where it is made, with its arguments
    if not (isinstance(kind, type) and issubclass(kind, OuterOptimizer)):
        return [
            "it is neither a class derived from megatron_ext.outer.optimizers.base.OuterOptimizer nor one of "
            "torch's optimizers"
        ]
    missing = missing_problems(kind, "name")
    if missing:
        return missing
    problems = claim_problems(name, kind, OPTIONS)
    # A class method has the function that it wraps, which its type does not say.
    has_form = kind.of_contributions.__func__ is not OuterOptimizer.of_contributions.__func__  # type: ignore[attr-defined]
    if Where.ASYNCHRONOUS not in kind.refused_in and not has_form:
        problems.append(
            f"it claims to work in {Where.ASYNCHRONOUS.value}, and lacks of_contributions; add it, or put "
            "Where.ASYNCHRONOUS into refused_in"
        )
    if problems:
        return problems
    options = {option: _VALUES[option] for option in kind.options}
    return _step_problems(kind, options)


def _start() -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, _NUMEL), torch.ones(3)]


def _gradient(number: int) -> torch.Tensor:
    return torch.randn(_NUMEL, generator=torch.Generator().manual_seed(number))


def _step_problems(kind: type[OuterOptimizer], options: dict[str, Any]) -> list[str]:
    """Return the problems of its steps and of its state, one sentence at most."""
    whole = slice(0, _NUMEL)
    anchors, own = _start(), _gradient(0)
    made: Any = kind(anchors, **options)
    made.step(0, whole, own.clone())
    moved = anchors[0].clone()
    if torch.equal(moved, _start()[0]) or not torch.equal(anchors[1], _start()[1]):
        return ["a step does not move the anchor that it is given, in place, and that one alone"]
    again = _start()
    twin: Any = kind(again, **options)
    if twin.elementwise:
        for part in (slice(0, 7), slice(7, _NUMEL)):
            twin.step(0, part, own[part].clone())
        if not torch.equal(again[0], moved):
            return ["it is elementwise, but makes another step range by range than of the whole anchor"]
    else:
        twin.step(0, whole, own.clone())
        if not torch.equal(again[0], moved):
            return ["it makes another step the second time; workers would drift apart"]
    fresh_anchors = _start()
    fresh: Any = kind(fresh_anchors, **options)
    try:
        fresh.load({}, {})
    except LookupError as error:
        return [f"load wants {error} also before the first step, when there is no state; start from rest then"]
    fresh.step(0, whole, own.clone())
    if not torch.equal(fresh_anchors[0], moved):
        return ["load without a state does not leave it at rest"]
    tensors = made.tensor_state()
    for state, held in tensors.items():
        if state in TAKEN:
            return [f"it calls a state {state!r}, which is the name of something else in checkpoints; rename it"]
        if [(value.dtype, value.shape) for value in held] != [(value.dtype, value.shape) for value in anchors]:
            return [f"its state {state!r} is not an fp32 tensor of the shape of every anchor"]
    resumed_anchors = [anchor.clone() for anchor in anchors]
    resumed: Any = kind(resumed_anchors, **options)
    resumed.load({state: [value.clone() for value in held] for state, held in tensors.items()}, made.scalar_state())
    for found in (made, resumed):
        found.step(0, whole, _gradient(1))
    if not torch.equal(resumed_anchors[0], anchors[0]):
        return ["after load it makes another step than the one whose state it was; a resumed run would differ"]
    return []
