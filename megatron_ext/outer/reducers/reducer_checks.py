# SPDX-License-Identifier: Apache-2.0
"""What is refused about another package's reducer before a run begins, as far as class and small tensors show it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_ext.outer.class_checks import claim_problems, missing_problems, same_bits
from megatron_ext.outer.places import Where
from megatron_ext.outer.reducers.linear import Linear
from megatron_ext.outer.reducers.reducer import OPTIONS, Reducer

__all__ = ["reducer_problems"]

_WORKERS, _NUMEL = 3, 40


def reducer_problems(name: str, kind: Any) -> list[str]:
    """Return what keeps an object from being the reducer of a name, one sentence each."""
    if not (isinstance(kind, type) and issubclass(kind, Reducer)):
        return ["it is not a class derived from megatron_ext.outer.reducers.reducer.Reducer"]
    missing = missing_problems(kind, "name")
    if missing:
        return missing
    problems = claim_problems(name, kind, OPTIONS)
    if problems:
        return problems
    reducer = kind()
    return _result_problems(reducer) or _place_problems(reducer)


def _terms(part: slice = slice(None)) -> list[torch.Tensor]:
    """Return all workers' pseudo-gradients of some elements, among them zeros of either sign."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(_NUMEL, generator=generator) for _ in range(_WORKERS)]
    found[0][:4], found[1][2:6] = 0.0, -0.0
    return [term[part].clone() for term in found]


def _sharing_memory(terms: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield terms, of which all but the first are in the same memory."""
    yield terms[0]
    memory = torch.empty_like(terms[0])
    for term in terms[1:]:
        yield memory.copy_(term)


def _result_problems(reducer: Reducer) -> list[str]:
    """Return the problems of what it makes, one sentence at most."""
    for weights in ([1.0] * _WORKERS, [0.2, 0.5, 0.3], [0.0, 1.0, 0.0], [0.0] * _WORKERS):
        made = reducer(_terms(), weights)
        if made.dtype != torch.float32 or made.shape != (_NUMEL,):
            return [f"it makes {made.dtype} of shape {tuple(made.shape)} of fp32 terms of shape ({_NUMEL},)"]
        if not made.isfinite().all():
            return [f"it makes a non-finite value of finite ones with the weights {weights}"]
        if not same_bits(reducer(_terms(), weights), made):
            return ["it makes other values of the same terms the second time; workers and peers would drift apart"]
        halves = (slice(0, _NUMEL // 2 - 3), slice(_NUMEL // 2 - 3, None))
        if not same_bits(torch.cat([reducer(_terms(part), weights) for part in halves]), made):
            return [
                "it makes other values of two parts of a tensor than of both at once; every element must be reduced by "
                "itself, since blocks and ranks cut tensors anywhere"
            ]
        if reducer.streams and not same_bits(reducer(_sharing_memory(_terms()), weights), made):
            return ["it says that it streams, but looks at a term again after it has asked for the next one"]
        if reducer.is_mean and not same_bits(Linear()(_terms(), weights), made):
            return ["it says that it is the weighted mean, but makes other bits than megatron_ext's"]
    return []


def _place_problems(reducer: Reducer) -> list[str]:
    """Return what it lacks of the places where it claims to work."""
    problems = []
    if reducer.in_pairs and Where.SERVER not in reducer.refused_in:
        problems.append(
            f"it claims to work in {Where.SERVER.value}, which keeps one anchor, and is in_pairs, which has none in "
            "common; put Where.SERVER into refused_in"
        )
    if Where.ASYNCHRONOUS not in reducer.refused_in:
        (term, *_) = _terms()
        if not same_bits(reducer([term.clone()], [1.0]), term):
            problems.append(
                f"it claims to work in {Where.ASYNCHRONOUS.value}, where each contribution comes alone, and makes "
                "something else of one term; put Where.ASYNCHRONOUS into refused_in"
            )
    return problems
