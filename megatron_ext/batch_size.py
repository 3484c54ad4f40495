# SPDX-License-Identifier: Apache-2.0
"""Whether a step's samples can be dealt out, which Megatron says without the names of the flags."""

from __future__ import annotations

from typing import Any

from megatron.core import num_microbatches_calculator

from megatron_ext.options import asks_to_switch

__all__ = ["batch_size_problem", "schedule_problem"]


def batch_size_problem(args: Any) -> str | None:
    """Return why the global batch size does not go with the other sizes, and the way out.

    Strategies that are switched have sizes of their own, which hot switching checks.

    Args:
        args: Megatron's arguments as parsed.
    """
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    # Where the sizes of the model are wrong, Megatron says why.
    if args.world_size % model or asks_to_switch(args):
        return None
    replicas = args.world_size // model
    of_steps = (args.global_batch_size, args.micro_batch_size)
    if not args.decrease_batch_size_if_needed and (problem := _problem("", *of_steps, replicas)) is not None:
        return problem
    # Releases before 0.19 evaluate with the sizes of a step.
    evaluated = (getattr(args, f"eval_{name}_batch_size", None) for name in ("global", "micro"))
    batch, micro = (own or other for own, other in zip(evaluated, of_steps, strict=True))
    return _problem("eval-", batch, micro, replicas) if hasattr(args, "eval_global_batch_size") else None


def schedule_problem(args: Any) -> str | None:
    """Return why Megatron cannot read the schedule of batch sizes, which it does after all arguments are taken.

    Args:
        args: Megatron's arguments as parsed.
    """
    # Releases before 0.19 have no schedules.
    calculator = getattr(num_microbatches_calculator, "StepBatchsizeNumMicroBatchesCalculator", None)
    schedule = getattr(args, "step_batch_size_schedule", None)
    if calculator is None or schedule is None or args.seq_length is None:
        return None
    try:
        calculator(1, 1, False, -1, schedule, args.seq_length)
    except (AssertionError, ValueError) as error:
        return (
            f"--step-batch-size-schedule {schedule!r}: {error}; give pairs of a threshold in tokens, the first 0 and "
            f"each a sequence ({args.seq_length}) or more above the one before, and a batch size, such as '0:4 64K:8'"
        )
    return None


def _problem(which: str, batch: int | None, micro: int | None, replicas: int) -> str | None:
    """Return why one batch cannot be dealt out; sizes that are not given, or wrong by themselves, Megatron judges."""
    if not batch or batch < 0 or not micro or micro < 0 or batch % (micro * replicas) == 0:
        return None
    whole = micro * replicas
    below = batch // whole * whole
    return (
        f"--{which}global-batch-size is {batch}, which is not a multiple of --{which}micro-batch-size {micro} times "
        f"the data-parallel size {replicas} (world size / TP*PP*CP); "
        f"give {f'{below} or ' if below else ''}{below + whole}"
    )
