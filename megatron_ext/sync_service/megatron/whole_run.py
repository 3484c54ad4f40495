# SPDX-License-Identifier: Apache-2.0
"""Resuming from a checkpoint of a job that had other samples: all of them, such as a stock one, or another part.

Megatron counts samples: those that were consumed say where the data continue, and the schedules of learning rate and
weight decay lie on the samples of all steps. A peer consumes a part of the samples only, usually with a smaller global
batch, so both counts have to become its own.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.hooks import LoadContext
from megatron_ext.seams.arguments import say
from megatron_ext.sync_service.megatron.step_size import samples_of_step

__all__ = ["count_schedule_in_own_samples", "resume_in_part"]

_SCHEDULE = "opt_param_scheduler"
_COUNTS = ("num_steps", "lr_warmup_steps", "lr_decay_steps", "wd_incr_steps")
"""What Megatron's scheduler counts in samples."""


def count_schedule_in_own_samples(context: LoadContext) -> None:
    """Let the schedules resume at the iteration where the checkpoint was made, whatever the global batch was there.

    Args:
        context: the whole state that was read; its scheduler's state is changed in place.
    """
    schedule, saved = context.state.get(_SCHEDULE), context.state.get("args")
    if schedule is None or getattr(saved, "global_batch_size", None) is None:
        return
    then, now = samples_of_step(saved), samples_of_step(context.args)
    if then == now:
        return
    for name in _COUNTS:
        count = schedule[name] * now / then
        schedule[name] = int(count) if count.is_integer() else count


def resume_in_part(args: Any, peers: int, before: int = 1) -> None:
    """Count the samples that were consumed in the part of one of the peers, and say so.

    Sample k of peer i of n is sample k n + i of the whole: none of those that were consumed comes again.

    Args:
        args: Megatron's arguments, after loading and before the data are built.
        peers: among which the samples are cut.
        before: among how many they were cut for the job that saved the checkpoint; 1 for one that was not a peer.

    Raises:
        UserError: samples are drawn at random within each part, so that those that were consumed lie anywhere.
    """
    consumed = args.consumed_train_samples * before
    if not consumed or before == peers:
        return
    who = "a job that was not a peer" if before == 1 else f"a run of {before} peers"
    if args.dataloader_type == "cyclic":
        raise UserError(
            f"--load is a checkpoint of {who}, and --dataloader-type cyclic draws its samples in another order for "
            f"{peers} peers: some of the {consumed} that were consumed would come again; use --dataloader-type single, "
            "or start fresh with --finetune"
        )
    args.consumed_train_samples = -(-consumed // peers)
    say(
        f"sync service: resumes at iteration {args.iteration} of {who} that consumed {consumed} "
        f"samples: the first {args.consumed_train_samples} of each of the {peers} parts"
    )
