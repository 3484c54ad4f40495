# SPDX-License-Identifier: Apache-2.0
"""Rounds that no worker waits for: a worker steps by its own share at once, by the others' a round later.

Eager updates (arXiv 2502.12996): in round t worker i's pseudo-gradient is

    D_i(t) / W + [the mean over all workers of D(t-1) - D_i(t-1) / W],

with D_i = phi_i - theta_i. What it sends has the whole interval to travel. Every contribution counts once, the others'
one round late, so anchors and outer states differ between the workers and each has its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_ext.local_sgd.exchange.judge import Judge
from megatron_ext.local_sgd.exchange.owned import OwnedRuns
from megatron_ext.local_sgd.exchange.rounds import Decision, RoundState
from megatron_ext.local_sgd.exchange.segment_memory import packed, unpack
from megatron_ext.outer.weighted_sum import weighted_mean
from megatron_ext.transport.collectives import Exchange, ExchangeMemory, part_bounds

__all__ = ["EagerRound"]


class EagerRound:
    """Steps by this worker's pseudo-gradient of now, and what the others had in the round before."""

    def __init__(self, owned: OwnedRuns, judge: Judge, device: torch.device) -> None:
        """Prepare.

        Args:
            owned: every worker owns everything.
            judge: adds up the norms.
            device: of the values.
        """
        self._owned = owned
        self._judge = judge
        self._late: list[torch.Tensor] = []
        """Per segment, what the others still have to give; where messages are in flight, minus the own share."""
        self._exchanges: list[Exchange] = []
        self._device = device
        self._turned = False

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends in a round, in both directions."""
        workers, worker = self._owned.workers, self._owned.worker
        sent = 0
        for segment in self._owned.segments:
            bounds = part_bounds(segment.numel, workers)
            own = bounds[worker + 1] - bounds[worker]
            sent += segment.numel - own + (workers - 1) * own
        return 4 * sent

    def run(self, state: RoundState) -> list[Decision]:
        """Make a round, once the messages of the one before are there.

        Raises:
            RuntimeError: a worker is non-finite; the run must end without saving.
        """
        owned, shard = self._owned, state.shard
        with state.clock.measure("waiting"):
            self.land()
        before, self._late = self._late or self._nothing(), []
        memory = ExchangeMemory()
        for index, (segment, others) in enumerate(zip(owned.segments, before, strict=True)):
            buffer = packed(segment, state.flats)
            sent = buffer[0].new_empty(segment.numel)
            with state.clock.measure("applying"):
                start = 0
                for own in buffer:
                    part = slice(start, start + own.numel())
                    run = owned.number(index, start)
                    shard.measure(run, [own], state.squares[owned.worker : owned.worker + 1, segment.unit])
                    shard.subtract(run, own, sent[part])
                    torch.div(sent[part], owned.workers, out=own)
                    own += others[part]
                    shard.add_square(state.squares[-1, segment.unit], own, run, 0)
                    shard.step(run, own, 1.0)
                    start += own.numel()
                self._late.append(sent / -owned.workers)
            self._exchanges.append(Exchange(index, (sent,), owned.group, memory))
            unpack(segment, buffer, state.flats)
        self._turned = False
        state.squares[-1] /= owned.workers  # every worker's step is another one: their root mean square
        self._judge.add_up(state.squares)
        self._judge.refuse_non_finite(state.squares[:-1], state.number)
        # Not before the norms, which would wait behind them.
        for exchange in self._exchanges:
            exchange.start()
        return []

    def turn(self) -> None:
        """Take the mean of what the others sent for this rank's part, and start to send it back."""
        for exchange in self._exchanges if not self._turned else []:
            exchange.turn(self._mean)
        self._turned = True

    def land(self) -> None:
        """Wait for what is in flight."""
        self.turn()
        for late, exchange in zip(self._late, self._exchanges, strict=False):
            late += exchange.finish()[0]
        self._exchanges = []

    def late(self) -> list[torch.Tensor]:
        """Return what the others still have to give, 1-D, in the order of the owned runs; waits for it."""
        self.land()
        return list(self._runs(self._late or self._nothing()))

    def load(self, late: list[torch.Tensor] | None = None) -> None:
        """Take over what `late` returned; without it nothing is late."""
        self._exchanges, self._late = [], []
        if late is not None:
            self._late = self._nothing()
            for run, saved in zip(self._runs(self._late), late, strict=True):
                run.copy_(saved)

    def _nothing(self) -> list[torch.Tensor]:
        return [torch.zeros(segment.numel, device=self._device) for segment in self._owned.segments]

    def _runs(self, by_segment: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        for index, run in self._owned.numbered:
            yield by_segment[index][run.start : run.start + run.numel]

    def _mean(self, index: int, start: int, terms: list[torch.Tensor]) -> None:
        terms[self._owned.worker].copy_(weighted_mean(terms, [1.0] * len(terms)))
