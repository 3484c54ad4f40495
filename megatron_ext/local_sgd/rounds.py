# SPDX-License-Identifier: Apache-2.0
"""The kinds of outer rounds: how the workers' values reach their owners, and what happens to them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_ext.local_sgd.judge import Judge
from megatron_ext.local_sgd.packing import packed, unpack
from megatron_ext.local_sgd.penalty import Verdict
from megatron_ext.local_sgd.report import RoundClock
from megatron_ext.local_sgd.segments import Piece, Run, Segment
from megatron_ext.local_sgd.shard import OuterShard
from megatron_ext.transport.collectives import Exchange, Memory, part_bounds, through_owners

__all__ = ["Decision", "GuardedRound", "OwnedRuns", "PlainRound", "Round", "RoundState", "decide_and_step"]

Decision = tuple[Verdict, float]
"""What was decided over a unit, and by what its common pseudo-gradient was multiplied."""

OwnedTerms = tuple[int, int, list[torch.Tensor]]
"""(number, unit, terms) of a run that this rank owns; the terms are those of `OuterShard`."""

Arrived = list[tuple[int, list[torch.Tensor]]]
"""(start, terms) of the runs that a rank owns of a segment."""


class OwnedRuns:
    """Which runs of elements this rank owns, as (index of the segment, run), numbered as in `OuterShard`."""

    def __init__(self, segments: Sequence[Segment], group: Any) -> None:
        """Find them.

        Args:
            segments: what is exchanged, the same on all ranks of `group`.
            group: process group, one rank per worker in worker order.
        """
        self.segments = segments
        self.group = group
        self.worker = dist.get_rank(group)
        self.workers = dist.get_world_size(group)
        self.numbered: list[tuple[int, Run]] = [
            (index, run)
            for index, segment in enumerate(segments)
            for run in segment.runs(*self.bounds(segment)[self.worker])
        ]
        self._number = {(index, run.start): number for number, (index, run) in enumerate(self.numbered)}

    def bounds(self, segment: Segment) -> list[tuple[int, int]]:
        """Return (first, one past the last) element of a segment that each worker owns."""
        return list(pairwise(part_bounds(segment.numel, self.workers)))

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends when every value travels as fp32, outward and homeward."""
        sent = 0
        for segment in self.segments:
            first, last = self.bounds(segment)[self.worker]
            sent += segment.numel - (last - first) + (self.workers - 1) * (last - first)
        return 4 * sent

    def number(self, index: int, start: int) -> int:
        """Return the number of the run at `start` of this rank's part of segment `index`."""
        return self._number[index, start]

    def pieces(self, segment: Segment, worker: int) -> list[Piece]:
        """Return what of the tensors a worker owns of a segment."""
        return list(segment.within(*self.bounds(segment)[worker]))


@dataclass(frozen=True, kw_only=True)
class RoundState:
    """What a round works on."""

    number: int
    """Its number, from 1."""

    shard: OuterShard
    """What this rank owns."""

    flats: list[torch.Tensor]
    """The values, 1-D; the synced ones afterwards."""

    squares: torch.Tensor
    """fp64, (workers + 1, units), zero: gets the squared norms of every worker's pseudo-gradient, and in the last row
    those of the common one, over the whole model."""

    clock: RoundClock
    """Takes the times."""


class Round(Protocol):
    """One kind of round."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends in a round, in both directions."""

    def run(self, state: RoundState) -> list[Decision]:
        """Make a round; return what was decided over each unit, nothing for the plain mean."""


class PlainRound:
    """Steps by the mean of all workers, segment by segment, while other segments are on their way."""

    def __init__(self, owned: OwnedRuns, judge: Judge) -> None:
        self._owned = owned
        self._judge = judge

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends in a round."""
        return self._owned.bytes_sent

    def run(self, state: RoundState) -> list[Decision]:
        """Make a round.

        Raises:
            RuntimeError: a worker was broken, which has spread by then; the run must end without saving.
        """
        owned, segments = self._owned, self._owned.segments

        def combine(index: int, start: int, terms: list[torch.Tensor]) -> None:
            with state.clock.measure("applying"):
                squares = state.squares[:, segments[index].unit]
                state.shard.mean_step(owned.number(index, start), terms, squares)

        buffers = (packed(segment, state.flats) for segment in segments)
        for segment, buffer in zip(segments, through_owners(buffers, owned.group, combine), strict=True):
            unpack(segment, buffer, state.flats)
        self._judge.add_up(state.squares)
        self._judge.refuse_broken(state.squares[:-1], state.number)
        return []


class GuardedRound:
    """Decides over every unit from all workers' norms, then reduces, clips and steps.

    The owners keep what they received until the norms over the whole model are known.
    """

    def __init__(self, owned: OwnedRuns, judge: Judge) -> None:
        self._owned = owned
        self._judge = judge

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends in a round."""
        return self._owned.bytes_sent

    def run(self, state: RoundState) -> list[Decision]:
        """Make a round.

        Raises:
            RuntimeError: a worker was broken, and is not to be left out.
        """
        owned, memory = self._owned, Memory()
        exchanges = [
            Exchange(index, packed(segment, state.flats), owned.group, memory).start()
            for index, segment in enumerate(owned.segments)
        ]
        arrived = [exchange.arrived() for exchange in exchanges]
        decisions, _ = decide_and_step(owned, self._judge, state, lambda: self._each(arrived))
        for exchange in exchanges:
            exchange.return_own()
        for segment, exchange in zip(owned.segments, exchanges, strict=True):
            unpack(segment, exchange.finish(), state.flats)
        return decisions

    def _each(self, arrived: list[Arrived]) -> Iterator[OwnedTerms]:
        """Yield every run that this rank owns."""
        for index, runs in enumerate(arrived):
            for start, terms in runs:
                yield self._owned.number(index, start), self._owned.segments[index].unit, terms


def decide_and_step(
    owned: OwnedRuns, judge: Judge, state: RoundState, each: Callable[[], Iterator[OwnedTerms]]
) -> tuple[list[Decision], dict[int, torch.Tensor]]:
    """Decide over every unit from all workers' norms, then reduce, clip and step what this rank owns.

    Args:
        owned: who owns what.
        judge: decides over the workers.
        state: of the round.
        each: begins to yield this rank's runs from the first one on; called twice.

    Returns:
        The decisions over the units, and by the run's number the new anchors, in the memory of this rank's own terms.

    Raises:
        RuntimeError: a worker was broken, and is not to be left out.
    """
    shard, squares = state.shard, state.squares
    with state.clock.measure("applying"):
        for run, unit, terms in each():
            shard.measure(run, terms, squares[:-1, unit])
    judge.add_up(squares)
    verdicts = judge.verdicts(squares[:-1], state.number)

    common: dict[int, torch.Tensor] = {}
    with state.clock.measure("applying"):
        for run, unit, terms in each():
            shard.reduce(run, terms, verdicts[unit], squares[-1, unit], (state.number, run))
            common[run] = terms[owned.worker]
    judge.add_up(squares[-1])
    coefficients = judge.coefficients(squares[-1])

    with state.clock.measure("applying"):
        for run, own in common.items():
            unit = owned.segments[owned.numbered[run][0]].unit
            shard.step(run, own, coefficients[unit] if verdicts[unit].accepted else None)
    return list(zip(verdicts, coefficients, strict=True)), common
