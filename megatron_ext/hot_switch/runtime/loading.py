# SPDX-License-Identifier: Apache-2.0
"""What a run must have in common with the one whose checkpoint it loads, so that it resumes as that would have."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_ext.errors import UserError
from megatron_ext.hooks import LoadContext

__all__ = ["order_changes", "refuse_other_vocabulary"]

_ORDER = {
    "seq_length": "--seq-length",
    "seed": "--seed",
    "data_path": "--data-path",
    "data_args_path": "--data-args-path",
    "train_data_path": "--train-data-path",
    "per_split_data_args_path": "--per-split-data-args-path",
    "mock_data": "--mock-data",
    "sft": "--sft",
    "split": "--split",
}
"""What the order of sequences is made from, and how to call it."""


def refuse_other_vocabulary(context: LoadContext, tensor_sizes: Sequence[int]) -> None:
    """Refuse to pad the vocabulary to another number of rows: the softmax goes over all of them.

    Megatron loads such a checkpoint without a word.

    Args:
        context: of the load; the common state is enough.
        tensor_sizes: of all strategies, home's first.

    Raises:
        UserError: with the padding to ask for.
    """
    saved, args = context.state.get("args"), context.args
    before, now = getattr(saved, "padded_vocab_size", None), getattr(args, "padded_vocab_size", None)
    if args.finetune or not before or not now or before == now:
        return
    if before % math.lcm(*tensor_sizes):
        way_out = f"choose strategies whose tensor parallel sizes all divide {before}"
    else:
        way_out = f"give --make-vocab-size-divisible-by {before // tensor_sizes[0]}"
    raise UserError(
        f"--load {context.directory}: its vocabulary was padded to {before} rows and this run's is padded to {now}, "
        f"over all of which the loss is taken, so that it would be another; {way_out}"
    )


def order_changes(context: LoadContext) -> list[str]:
    """Return a line for everything that puts another sequence at the place where the loaded run stood."""
    saved, args = context.state.get("args"), context.args
    if saved is None or args.finetune:
        return []
    if not (getattr(saved, "hot_switch_strategies", None) or getattr(saved, "hot_switch_strategy_file", None)):
        read = getattr(saved, "consumed_train_samples", 0)
        if not read:
            return []
        return [
            f"hot switching: the run that saved had none: its {read} samples were Megatron's own, in its order. "
            "This run counts on in sequences of its own order, of which some were read before and the first ones "
            "come in the next epoch only; give --finetune to begin with the first one, at iteration 0"
        ]
    return [
        f"hot switching: {flag} was {getattr(saved, name)} in the run that saved and is {getattr(args, name)}: the "
        "order of sequences is another from here on, some of which were read before"
        for name, flag in _ORDER.items()
        if hasattr(saved, name) and getattr(saved, name) != getattr(args, name)
    ]
