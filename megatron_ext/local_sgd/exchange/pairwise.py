# SPDX-License-Identifier: Apache-2.0
"""Rounds of random pairs: no worker waits for more than one other (NoLoCo, arXiv 2506.10911).

Every worker i has an anchor phi_i and an outer state of its own. In a round it meets one other worker j, and the
pseudo-gradient is phi_i minus the mean of theta_i and theta_j. That is NoLoCo's step where its weight gamma of the
difference between the anchors equals its outer learning rate: both terms together need the partner's theta alone. The
anchors are never equal, but drawn to each other in every round.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_ext.local_sgd.exchange.judge import Judge
from megatron_ext.local_sgd.exchange.owned import OwnedRuns
from megatron_ext.local_sgd.exchange.rounds import Decision, RoundState
from megatron_ext.local_sgd.exchange.segment_memory import packed, unpack

__all__ = ["PairwiseRound", "partners"]


def partners(number: int, workers: int) -> list[int]:
    """Return whom every worker meets in round `number`; with an odd number of workers one meets itself."""
    order = torch.randperm(workers, generator=torch.Generator().manual_seed(number)).tolist()
    found = list(range(workers))
    for first, second in zip(order[::2], order[1::2], strict=False):
        found[first], found[second] = second, first
    return found


class PairwiseRound:
    """Steps by the mean of two workers, each with its own anchor."""

    def __init__(self, owned: OwnedRuns, judge: Judge) -> None:
        self._owned = owned
        self._judge = judge

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends in a round: its values, to one other."""
        return 4 * sum(segment.numel for segment in self._owned.segments)

    def run(self, state: RoundState) -> list[Decision]:
        """Make a round.

        Raises:
            RuntimeError: this worker or its partner is non-finite; the run must end without saving.
        """
        owned = self._owned
        partner = partners(state.number, owned.workers)[owned.worker]
        buffers = [packed(segment, state.flats) for segment in owned.segments]
        arriving = [self._swap(buffer, partner) for buffer in buffers]
        squares = state.squares.new_zeros(3, state.squares.shape[1])
        for index, (segment, buffer, (theirs, works)) in enumerate(zip(owned.segments, buffers, arriving, strict=True)):
            for work in works:
                work.wait()  # for what leaves as well: the outer step overwrites it
            start = 0
            with state.clock.measure("applying"):
                for place, own in enumerate(buffer):
                    terms = [own] if partner == owned.worker else [own, theirs[place]]
                    state.shard.mean_step(owned.number(index, start), terms, squares[:, segment.unit])
                    start += own.numel()
            unpack(segment, buffer, state.flats)
        state.squares[partner], state.squares[owned.worker], state.squares[-1] = squares[1], squares[0], squares[2]
        self._judge.add_up_inside(state.squares)
        self._judge.refuse_non_finite(state.squares[:-1], state.number)
        return []

    def _swap(self, buffer: list[torch.Tensor], partner: int) -> tuple[list[torch.Tensor], list[dist.Work]]:
        """Start to send a buffer to the partner, and to receive theirs."""
        if partner == self._owned.worker:
            return [], []
        theirs = [torch.empty_like(run) for run in buffer]
        group = self._owned.group
        operations = [dist.P2POp(dist.isend, run, group=group, group_peer=partner) for run in buffer]
        operations += [dist.P2POp(dist.irecv, run, group=group, group_peer=partner) for run in theirs]
        return theirs, dist.batch_isend_irecv(operations)
