# SPDX-License-Identifier: Apache-2.0
"""What is refused about any other package's class of a part of the round, be it a reducer, a codec or an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_ext.outer.places import place_claims

__all__ = ["claim_problems", "missing_problems", "same_bits"]


def missing_problems(kind: Any, *attributes: str) -> list[str]:
    """Return what a class lacks, one sentence at most; the other checks need all of it.

    Args:
        kind: a class derived from the part's abstract one.
        attributes: what it has to set.
    """
    missing = [name for name in attributes if not hasattr(kind, name)]
    missing += sorted(kind.__abstractmethods__)
    return [f"it lacks {', '.join(missing)}"] if missing else []


def claim_problems(name: str, kind: Any, options: Sequence[str] | None = None) -> list[str]:
    """Return the problems of what a whole class says of itself, one sentence each.

    Args:
        name: that of its entry point.
        kind: the class.
        options: those that it may take; None where a part of its kind takes none.
    """
    problems = place_claims(kind)
    if kind.name != name:
        problems.append(f"its name is {kind.name!r}; give it that of the entry point")
    if options is not None:
        problems += [
            f"its options have {option!r}; the options are {', '.join(options)}"
            for option in kind.options
            if option not in options
        ]
    return problems


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the bits of two fp32 tensors are the same."""
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))
