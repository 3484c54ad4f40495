# SPDX-License-Identifier: Apache-2.0
"""The command in a rank, where Megatron is imported."""

import contextlib
import io
import json
from collections.abc import Sequence
from typing import Any

from tests.support.distributed import run_ranks

__all__ = ["explained", "run_all"]


def explained(ranks: int, words: Sequence[str], *options: str) -> dict[str, Any]:
    """Return the JSON of a run on CPU, of one node."""
    ((code, output, errors),) = run_all([[*given(ranks), *options, "--json", "--", *words]])
    assert code == 0, errors
    found: dict[str, Any] = json.loads(output)
    return found


def given(ranks: int) -> list[str]:
    """Return the command's options for one node of CPUs."""
    return ["--backend", "cpu", "--nproc-per-node", str(ranks)]


def run_all(commands: Sequence[Sequence[str]]) -> list[tuple[int, str, str]]:
    """Return (exit code, output, errors) of several commands, made one after the other in one process."""
    (found,) = run_ranks(_run, 1, [list(command) for command in commands])
    result: list[tuple[int, str, str]] = found
    return result


def _run(commands: list[list[str]]) -> list[tuple[int, str, str]]:
    from megatron_ext.cli.main import main

    found = []
    for command in commands:
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
            code = main(["explain", *command])
        found.append((code, output.getvalue(), errors.getvalue()))
    return found
