# SPDX-License-Identifier: Apache-2.0
"""Run an upstream-style training script unchanged: `python -m megatron_ext [--backend B] SCRIPT ARGS...`.

Works under torchrun as well: `torchrun ... -m megatron_ext pretrain_gpt.py ...`.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from megatron_ext.activation import Backend, patch_megatron
from megatron_ext.errors import UserError, report

__all__ = ["main", "run_script"]


def run_script(path: str, arguments: Sequence[str], backend: Backend = "auto") -> None:
    """Patch Megatron and run a script as `python SCRIPT ARGUMENTS` would.

    Args:
        path: the script's file.
        arguments: its command line.
        backend: as for `patch_megatron`.

    Raises:
        UserError: there is no such file.
    """
    if not os.path.isfile(path):
        way_out = "give the path of a training script such as pretrain_gpt.py"
        if path.isidentifier() or path in ("local-sgd", "hot-switch"):
            way_out += f", or, for a command of this package, run `megatron-ext {path}`"
            way_out += f" (the same: `python -m megatron_ext.cli.main {path}`)"
        raise UserError(f"{path}: no such script; {way_out}")
    sys.argv = [path, *arguments]
    # What `python SCRIPT` does: the script imports its neighbours.
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    patch_megatron(backend)
    runpy.run_path(path, run_name="__main__")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse our own options, which stand before the script, and run it."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext",
        description="Run a Megatron-LM training script with megatron_ext patched in.",
        epilog="Everything after SCRIPT goes to the script; `SCRIPT --help` lists Megatron's options and ours.",
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: CPU and gloo when there is no CUDA device; cpu: force that; cuda: forbid it",
    )
    parser.add_argument("script", metavar="SCRIPT", help="path of the training script")
    own = parser.add_argument(
        "arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments"
    )
    own.required = False  # argparse would ask for them where the script is missing
    options = parser.parse_args(argv)
    try:
        run_script(options.script, options.arguments, options.backend)
    except UserError as error:
        report(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
