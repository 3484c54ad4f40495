# SPDX-License-Identifier: Apache-2.0
"""Seam: Megatron's local attention under context parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_ext.patching import Patch

__all__ = ["patches"]


def patches() -> list[Patch]:
    """Return the patches of this seam."""
    return [
        Patch(
            name="attention/context-parallel",
            target="megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
            wrap=_init_for_whole_rows,
            reason="let the local attention be built under context parallelism, which Megatron refuses; who asks for "
            "it gives the module a forward pass over parts of rows",
            parameters=("config",),
        )
    ]


def _init_for_whole_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        size = config.context_parallel_size
        config.context_parallel_size = 1
        try:
            original(self, config, *args, **kwargs)
        finally:
            config.context_parallel_size = size
        if size > 1:
            self.forward = _refuse

    return init


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "Megatron's local attention was left as it is under context parallelism, which it does not know: its results "
        "would be wrong"
    )
