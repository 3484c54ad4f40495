# SPDX-License-Identifier: Apache-2.0
"""Megatron's options on CPU: other defaults, and the ones that cannot work, both from the table of options."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from megatron_ext.options import ROWS, refusals

__all__ = ["ARGUMENT_DEFAULTS", "problems", "set_argument_defaults"]

ARGUMENT_DEFAULTS: dict[str, Any] = {name: value for row in ROWS for name, value in row.cpu_default.items()}
"""What a Megatron option is on CPU when the command line does not say, by its name in the namespace."""


def set_argument_defaults(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the defaults that let a plain Megatron command run on CPU; explicit values still win."""
    parser.set_defaults(**ARGUMENT_DEFAULTS)


def problems(args: argparse.Namespace) -> list[str]:
    """Return one sentence for each option in `args` that cannot work on CPU, with the way out.

    Args:
        args: Megatron's arguments as parsed, before Megatron validates and changes them.
    """
    found = []
    if _fused_kernels_installed():
        found.append(
            "Transformer Engine or Apex is installed: Megatron would call their CUDA kernels on CPU tensors; "
            "use an environment without them"
        )
    return found + refusals(args, "cpu")


def _fused_kernels_installed() -> bool:
    return bool(importlib.import_module("megatron.core.optimizer.distrib_optimizer").HAVE_APEX_OR_TE)
