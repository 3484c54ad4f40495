# SPDX-License-Identifier: Apache-2.0
"""Megatron's options: what each feature and backend does with each of them, and why.

One table, from which come the refusals of every feature, what the peers of a run must have in common, other defaults on
CPU, and the page `docs/support-table.md` (`megatron_ext.support`). To say what a feature does with an option, edit its
row: rows are in the files named after areas of Megatron, and a verdict is made by one of the functions of `verdict`.
"""

from megatron_ext.options.asked import asks_to_switch, layers_file_problem
from megatron_ext.options.optimizer_package import missing_optimizers
from megatron_ext.options.row import Row
from megatron_ext.options.table import ROWS, refusals, refused_rows, shared_by_peers
from megatron_ext.options.unknown import UnknownOption, unknown_options, unknown_problems
from megatron_ext.options.verdict import FEATURES, OptionVerdict

__all__ = [
    "FEATURES",
    "ROWS",
    "OptionVerdict",
    "Row",
    "UnknownOption",
    "asks_to_switch",
    "layers_file_problem",
    "missing_optimizers",
    "refusals",
    "refused_rows",
    "shared_by_peers",
    "unknown_options",
    "unknown_problems",
]
