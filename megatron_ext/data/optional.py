# SPDX-License-Identifier: Apache-2.0
"""Packages of the extra `data`, imported only where a feature needs them."""

from __future__ import annotations

import importlib
from types import ModuleType

from megatron_ext.errors import UserError
from megatron_ext.extras import pip_install

__all__ = ["import_optional"]


def import_optional(module: str, purpose: str) -> ModuleType:
    """Import a module of the extra `data`.

    Args:
        module: Dotted module name.
        purpose: What it is needed for, put in front of the error message.

    Raises:
        UserError: The package is missing or cannot be imported; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(
            f"{purpose} needs the package {package} ({error}); install it with: {pip_install(package)}"
        ) from error
