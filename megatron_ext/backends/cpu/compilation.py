# SPDX-License-Identifier: Apache-2.0
"""Nothing is compiled on CPU: neither what Megatron decorates while it is imported, nor what was decorated before.

What is decorated while the backend is on is not compiled later either, when it was switched off again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron_ext.backends.cpu.device_placement import TORCH_VERSIONS
from megatron_ext.patching import Patch

__all__ = ["patches"]


def patches() -> tuple[Patch, ...]:
    """Return the records of this module, always the same objects; to be applied before Megatron is imported."""
    return _PATCHES


def _functions_as_they_are(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile, **options)
        # A module is wrapped in another one, which changes the names of its parameters: that has to stay.
        return model if inspect.isfunction(model) else original(model, **options)

    return compile


_PATCHES = (
    Patch(
        name="cpu/torch.compile",
        target="torch:compile",
        wrap=_functions_as_they_are,
        reason="Megatron decorates its fused functions with torch.compile, which imports the whole compiler in every "
        "process, although nothing is compiled on CPU.",
        versions=TORCH_VERSIONS,
        distribution="torch",
    ),
)
