# SPDX-License-Identifier: Apache-2.0
"""Seam: torch's norms under sequence parallelism."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from megatron_ext.patching import Patch

__all__ = ["patches"]


def patches() -> list[Patch]:
    """Return the patches of this seam."""
    return [
        Patch(
            name="norms/sequence-parallel",
            target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            wrap=_norm_with_sequence_parallel,
            reason="torch's norms, which Megatron's local implementation has without Apex and for RMSNorm, are right "
            "under sequence parallelism once their weights' gradients are marked for the all-reduce; Megatron refuses "
            "them.",
            parameters=("config", "hidden_size"),
        )
    ]


def _norm_with_sequence_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        unsplit = copy.copy(config)
        unsplit.sequence_parallel = False
        norm = original(cls, unsplit, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return new
