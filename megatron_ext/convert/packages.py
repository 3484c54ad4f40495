# SPDX-License-Identifier: Apache-2.0
"""Packages that conversion needs and the rest of this package does not."""

from __future__ import annotations

import importlib
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.extras import pip_install

__all__ = ["safetensors"]


def safetensors(module: str = "") -> Any:
    """Return the package that reads and writes safetensors files, or a module of it.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(".".join(filter(None, ("safetensors", module))))
    except ImportError as error:
        raise UserError(
            f"convert: the package safetensors is not installed; run `{pip_install('safetensors')}`"
        ) from error
