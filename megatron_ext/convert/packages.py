# SPDX-License-Identifier: Apache-2.0
"""Packages that conversion needs and the rest of this package does not."""

from __future__ import annotations

import importlib
from typing import Any

from megatron_ext.errors import UserError

__all__ = ["safetensors"]


def safetensors(module: str = "") -> Any:
    """Return the package that reads and writes safetensors files, or a module of it.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(".".join(filter(None, ("safetensors", module))))
    except ImportError as error:
        raise UserError("convert: the package safetensors is not installed; run `pip install safetensors`") from error
