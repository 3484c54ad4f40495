# SPDX-License-Identifier: Apache-2.0
"""How a wrapper reads what its original is called with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

__all__ = ["bound_with_defaults"]


def bound_with_defaults(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return a call's arguments by parameter, those that it leaves to their defaults too.

    Args:
        signature: of the original, taken once, when it is wrapped.
        args: of the call.
        kwargs: of the call.

    Raises:
        TypeError: the original cannot be called so.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound
