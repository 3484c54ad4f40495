# SPDX-License-Identifier: Apache-2.0
"""The table, and what is asked of it."""

from __future__ import annotations

from typing import Any

from megatron_ext.options.checkpoint_formats import CHECKPOINT_FORMATS
from megatron_ext.options.checkpoints import CHECKPOINTS
from megatron_ext.options.data_order import DATA_ORDER
from megatron_ext.options.data_parallel import DATA_PARALLEL
from megatron_ext.options.implementations import IMPLEMENTATIONS
from megatron_ext.options.layer_function import LAYER_FUNCTION
from megatron_ext.options.memory_savings import MEMORY_SAVINGS
from megatron_ext.options.mixture import MIXTURE
from megatron_ext.options.optimizers import OPTIMIZERS
from megatron_ext.options.positions import POSITIONS
from megatron_ext.options.rank_groups import RANK_GROUPS
from megatron_ext.options.recording import RECORDING
from megatron_ext.options.row import Row
from megatron_ext.options.run_control import RUN_CONTROL
from megatron_ext.options.verdict import CIRCUMSTANCES, FEATURES, OptionVerdict

__all__ = ["ROWS", "refusals", "refused_rows", "shared_by_peers"]

ROWS: tuple[Row, ...] = (
    *DATA_PARALLEL,
    *RANK_GROUPS,
    *OPTIMIZERS,
    *IMPLEMENTATIONS,
    *MEMORY_SAVINGS,
    *LAYER_FUNCTION,
    *POSITIONS,
    *MIXTURE,
    *DATA_ORDER,
    *CHECKPOINT_FORMATS,
    *CHECKPOINTS,
    *RUN_CONTROL,
    *RECORDING,
)
"""The table."""


def refusals(args: Any, feature: str, circumstance: str = "") -> list[str]:
    """Return one sentence for each option in `args` that is refused together with `feature`.

    Args:
        args: Megatron's arguments as parsed, before Megatron validates and changes them.
        feature: a key of `FEATURES`.
        circumstance: one of the feature's in `CIRCUMSTANCES`, to get what is refused because of it alone.

    Raises:
        KeyError: the table does not know `feature` or `circumstance`.
    """
    said = [
        verdict.sentence(row.option, "" if row.refuses_by_itself(verdict) else FEATURES[feature])
        for row, verdict in refused_rows(args, feature, circumstance)
    ]
    return list(dict.fromkeys(said))  # options may share a sentence


def refused_rows(args: Any, feature: str, circumstance: str = "") -> list[tuple[Row, OptionVerdict]]:
    """Return the rows whose options `refusals` speaks of, each with the verdict that refuses it."""
    if circumstance and circumstance not in CIRCUMSTANCES[feature]:
        raise KeyError(circumstance)
    found = []
    for row in ROWS:
        verdict = row.verdicts[feature]
        judged = verdict.exceptions.get(circumstance) if circumstance else verdict
        if judged is not None and judged.refuses and row.is_in(args) and row.asked(args):
            found.append((row, judged))
    return found


def shared_by_peers(args: Any) -> dict[str, str]:
    """Return the options that all peers of a run must have in common, each with its value as peers compare it.

    Args:
        args: Megatron's arguments, checked.
    """
    found = {}
    for row in ROWS:
        share = row.peers_share
        if share and row.is_in(args):
            found[row.option] = str(getattr(args, share) if isinstance(share, str) else share(args))
    return found
