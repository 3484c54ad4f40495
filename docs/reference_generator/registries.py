# SPDX-License-Identifier: Apache-2.0
"""A registry as Markdown: each name that a user can give, and the first sentence of its class."""

from __future__ import annotations

import inspect
import pkgutil

from megatron_ext.plugins import Registry
from reference_generator.prose import as_markdown

__all__ = ["markdown"]


def markdown(dotted: str) -> str:
    """Return a definition list of this package's own names.

    Args:
        dotted: import path of a registry, such as megatron_ext.outer.codecs.all_codecs.CODECS.
    """
    registry = pkgutil.resolve_name(dotted)
    assert isinstance(registry, Registry)
    lines = []
    for name in registry.own_names:
        told = (inspect.getdoc(registry.find(name)) or "").split("\n\n")[0]
        lines += [f"`{name}`", f": {as_markdown(' '.join(told.split()))}", ""]
    return "\n".join(lines)
