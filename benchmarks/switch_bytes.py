# SPDX-License-Identifier: Apache-2.0
"""What the switches of a training run send, counted at the sends, against parameters and gradients of their plans."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from tests.hot_switch.runs import arguments
from tests.support.pretrain import run_pretrain

__all__ = ["bytes_beside_the_plans"]

STRATEGIES, BUCKETS = ("1,2,2", "4,1,1", "2,2,1"), (32, 16, 8, 0)

_seen = {"sent": 0, "planned": 0, "switches": 0}


def bytes_beside_the_plans() -> int:
    """Train a toy GPT with Adam and three strategies; return the bytes of switches that are in no plan.

    Plans have parameters, and the gradients of them, alone: what is left would be the optimizer's.

    Raises:
        RuntimeError: the switches sent nothing, so that nothing was counted.
    """
    command = arguments(STRATEGIES, BUCKETS, train_iters=2)
    seen = [rank.probe for rank in run_pretrain(command, 4, before=count_sends, probe=counted)]
    sent, planned, switches = (sum(each[name] for each in seen) for name in ("sent", "planned", "switches"))
    if not (sent and switches):
        raise RuntimeError("the switches of the training run sent nothing")
    return int(sent - planned)


def counted(model: Any, optimizer: Any, args: Any) -> dict[str, int]:
    """Return what this rank counted."""
    return dict(_seen)


def count_sends() -> None:
    """Count, on this rank, what switches send and what their plans say."""
    import torch.distributed as dist

    from megatron_ext.hot_switch.transfer.arriving import Arriving
    from megatron_ext.hot_switch.transfer.executor import SwitchExecutor

    planned: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
    make, begin, send = SwitchExecutor.__init__, SwitchExecutor.begin, Arriving._send
    exchange = dist.batch_isend_irecv

    @functools.wraps(make)
    def made(self: Any, plan: Any, group: Any, **options: Any) -> None:
        make(self, plan, group, **options)
        moves = [move for to_peer in plan.sends(dist.get_rank(group)).values() for move in to_peer]
        factor = 4 // plan.tensors[0].tensor.dtype.itemsize if options.get("gradients") else 1
        planned[self] = factor * sum(move.nbytes for move in moves)

    @functools.wraps(begin)
    def begun(self: Any, *args: Any, **options: Any) -> Any:
        _seen["planned"] += planned[self]
        _seen["switches"] += 1
        return begin(self, *args, **options)

    @functools.wraps(send)
    def sent(self: Any) -> None:
        with mock.patch.object(dist, "batch_isend_irecv", counting):
            send(self)

    def counting(operations: Sequence[Any]) -> Any:
        _seen["sent"] += sum(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return exchange(list(operations))

    for owner, name, counts in (
        (SwitchExecutor, "__init__", made),
        (SwitchExecutor, "begin", begun),
        (Arriving, "_send", sent),
    ):
        setattr(owner, name, counts)
