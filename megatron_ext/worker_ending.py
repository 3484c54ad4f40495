# SPDX-License-Identifier: Apache-2.0
"""Workers that are told to end, by a signal or a time limit, where they do not wait for each other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_ext.run_options import run_options
from megatron_ext.transport.common_stop import CommonStop

__all__ = ["is_common_end", "is_told_to_end", "training_starts"]


class _Ending:
    """How the training that is under way is to end."""

    trainings = 0
    """Of this process."""

    stop: CommonStop | None = None
    """From the first time that workers are asked where they do not meet."""


_ending = _Ending()


def training_starts() -> None:
    """Forget how the training before has ended."""
    _ending.trainings, _ending.stop = _ending.trainings + 1, None


def is_common_end(iteration: int, say: Callable[[str], None]) -> bool:
    """Return whether all ranks have agreed to end after this iteration, at which workers do not meet.

    Args:
        iteration: the one that this rank has made.
        say: told in one line when they have.
    """
    args = run_options()
    if not _may_be_told(args):
        return False
    stop = _common_stop()
    known = stop.iteration is not None
    ends = stop.is_reached(iteration, wanted=_wants_to_end(args))
    if stop.iteration is not None and not known:
        say(f"told to end (signal or time limit): all workers do so after iteration {stop.iteration}")
    return ends


def is_told_to_end() -> bool:
    """Return whether a rank of any worker is, so that workers need not train until they would meet anyway."""
    args = run_options()
    return _may_be_told(args) and _common_stop().is_wanted(wanted=_wants_to_end(args))


def _may_be_told(args: Any) -> bool:
    return bool(args.exit_signal_handler or args.exit_duration_in_mins)


def _common_stop() -> CommonStop:
    if _ending.stop is None:
        # torchrun may keep the store when it starts the ranks again.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"megatron_ext/end of training {_ending.trainings}, start {start}"
        store = dist.distributed_c10d._get_default_store()
        _ending.stop = CommonStop(store, prefix, dist.get_rank(), dist.get_world_size())
    return _ending.stop


def _wants_to_end(args: Any) -> bool:
    """Return whether this rank has got the signal, or its time is over."""
    from megatron.training import get_signal_handler, training

    if args.exit_signal_handler and get_signal_handler()._signal_received:
        return True
    limit = args.exit_duration_in_mins
    return bool(limit) and (time.time() - training._TRAIN_START_TIME) / 60 > limit
