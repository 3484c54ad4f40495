# SPDX-License-Identifier: Apache-2.0
"""How many samples a job consumes in a step, by its arguments or by those that a checkpoint was saved with."""

from __future__ import annotations

from typing import Any

__all__ = ["samples_of_step"]


def samples_of_step(args: Any) -> int:
    """Return the samples that Megatron consumes in a step: with --decrease-batch-size-if-needed as many whole
    micro-batches for every replica as --global-batch-size has.

    Args:
        args: Megatron's arguments, checked, of a job whose steps are all alike.
    """
    size = int(args.global_batch_size)
    # Checkpoints of older releases do not know the option.
    if not getattr(args, "decrease_batch_size_if_needed", False):
        return size
    return size - size % int(args.micro_batch_size * args.data_parallel_size)
