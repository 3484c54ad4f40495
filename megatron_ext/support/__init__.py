# SPDX-License-Identifier: Apache-2.0
"""Which of Megatron's options work with which ability or backend: one table for the code and for the docs.

The table covers the options that touch data parallelism, optimizers or checkpoints. A row either names the
test that runs the option, or refuses it with a reason and a way out; `without_rows` says of the remaining ones why
they need none. What cannot work on CPU for other reasons (fused kernels, Transformer Engine) is in
`backends.cpu.options`.

`python -m megatron_ext.support` prints the table as Markdown.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.support.checkpoints import CHECKPOINTS
from megatron_ext.support.data_parallel import DATA_PARALLEL
from megatron_ext.support.optimizers import OPTIMIZERS
from megatron_ext.support.row import ABILITIES, Row
from megatron_ext.support.run_control import RUN_CONTROL
from megatron_ext.support.sync_service import SYNC_SERVICE

__all__ = ["ABILITIES", "ROWS", "Row", "markdown", "refusals"]

ROWS: tuple[Row, ...] = tuple(
    row for part in (DATA_PARALLEL, OPTIMIZERS, CHECKPOINTS, RUN_CONTROL, SYNC_SERVICE) for rows in part for row in rows
)
"""The table."""


def refusals(args: Any, ability: str) -> list[str]:
    """Return one sentence for each option in `args` that is refused together with `ability`.

    Args:
        args: Megatron's arguments as parsed, before Megatron validates and changes them.
        ability: a key of `ABILITIES`.

    Raises:
        KeyError: the table does not know `ability`.
    """
    where = ABILITIES[ability]
    return [
        f"{row.option} is not supported {where}: {row.reason}; {row.way_out}"
        for row in ROWS
        if row.status == "refused" and ability in row.applies_to and row.asked(args)
    ]


def markdown() -> str:
    """Return the table for the documentation."""
    lines = [
        "# Megatron options: supported, or refused by name",
        "",
        "Options that touch data parallelism, optimizers or checkpoints. A supported one names the test that",
        "runs it; a refused one ends the run at its start with the sentence below. This file is written by",
        "`python -m megatron_ext.support > docs/support-table.md`.",
    ]
    for ability, where in ABILITIES.items():
        lines += [
            "",
            f"## {where[0].upper()}{where[1:]}",
            "",
            "| option | status | test, or reason and way out |",
        ]
        lines.append("|---|---|---|")
        for row in ROWS:
            if ability in row.applies_to:
                detail = f"`{row.tested_by}`" if row.status == "supported" else f"{row.reason}; {row.way_out}"
                lines.append(f"| `{row.option}` | {row.status} | {detail} |")
    return "\n".join(lines) + "\n"
