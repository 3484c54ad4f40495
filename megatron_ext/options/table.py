# SPDX-License-Identifier: Apache-2.0
"""The table, and what is asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_ext.options.checkpoint_formats import CHECKPOINT_FORMATS
from megatron_ext.options.checkpoints import CHECKPOINTS
from megatron_ext.options.data_order import DATA_ORDER
from megatron_ext.options.data_parallel import DATA_PARALLEL
from megatron_ext.options.implementations import IMPLEMENTATIONS
from megatron_ext.options.memory_savings import MEMORY_SAVINGS
from megatron_ext.options.mixture import MIXTURE
from megatron_ext.options.model_function import MODEL_FUNCTION
from megatron_ext.options.optimizers import OPTIMIZERS
from megatron_ext.options.rank_groups import RANK_GROUPS
from megatron_ext.options.recording import RECORDING
from megatron_ext.options.row import Row
from megatron_ext.options.run_control import RUN_CONTROL
from megatron_ext.options.verdict import ABILITIES, OptionVerdict

__all__ = ["ROWS", "refusals"]

ROWS: tuple[Row, ...] = (
    *DATA_PARALLEL,
    *RANK_GROUPS,
    *OPTIMIZERS,
    *IMPLEMENTATIONS,
    *MEMORY_SAVINGS,
    *MODEL_FUNCTION,
    *MIXTURE,
    *DATA_ORDER,
    *CHECKPOINT_FORMATS,
    *CHECKPOINTS,
    *RUN_CONTROL,
    *RECORDING,
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
    said = [verdict.sentence(row.option, where) for row, verdict in _refused(args, ability)]
    return list(dict.fromkeys(said))  # options may share a sentence


def _refused(args: Any, ability: str) -> Iterator[tuple[Row, OptionVerdict]]:
    for row in ROWS:
        verdict = row.verdicts[ability]
        if verdict.refuses and row.asked(args):
            yield row, verdict
