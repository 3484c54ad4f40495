# SPDX-License-Identifier: Apache-2.0
"""The `megatron-ext` command: one subcommand per file of this folder."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from megatron_ext.cli import (
    convert,
    data,
    doctor,
    evaluate,
    explain,
    hot_switch,
    local_sgd,
    patches,
    server,
    simulate,
    spes,
)
from megatron_ext.cli.command_parser import CommandParser
from megatron_ext.errors import UserError
from megatron_ext.version import __version__

__all__ = ["main", "make_parser"]


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STANDARD_OUTPUT = 1


def make_parser() -> CommandParser:
    """Return the parser of all subcommands."""
    parser = CommandParser(prog="megatron-ext", description="Tools of megatron_ext.")
    parser.add_argument("--version", action="version", version=f"megatron-ext {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (patches, doctor, explain, data, convert, evaluate, local_sgd, hot_switch, simulate, server, spes):
        module.add_parser(subparsers)
    return parser.join()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 2 for bad input or an output that is full, 130 after Ctrl-C."""
    options = make_parser().parse_args(argv)
    try:
        status = int(options.func(options))
        if sys.stdout is not None:  # closed by who started this
            sys.stdout.flush()
        return status
    except UserError as error:
        print(f"megatron-ext: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    except OSError as error:
        if error.errno not in _FULL:
            raise
        what = error.filename or "the output"
        print(f"megatron-ext: error: {what} cannot be written: {error.strerror}; make room there", file=sys.stderr)
        if error.filename is None:
            # What is left would be written at the end of the process once more, and fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), _STANDARD_OUTPUT)
        return 2
    except KeyboardInterrupt:
        print("megatron-ext: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
