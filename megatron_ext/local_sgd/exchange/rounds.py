# SPDX-License-Identifier: Apache-2.0
"""The kinds of outer rounds: how the workers' values reach their owners, and what happens to them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_ext.local_sgd.exchange.judge import Judge
from megatron_ext.local_sgd.exchange.owned import OwnedRuns
from megatron_ext.local_sgd.exchange.owner_shard import OuterShard
from megatron_ext.local_sgd.exchange.segment_memory import packed, unpack
from megatron_ext.local_sgd.reporting.round_report import RoundClock
from megatron_ext.outer.penalty import Verdict
from megatron_ext.transport.collectives import Combine, Exchange, ExchangeMemory, through_owners

__all__ = [
    "BackgroundRound",
    "Decision",
    "GuardedRound",
    "PlainRound",
    "Round",
    "RoundState",
    "add_up_overlap",
    "decide_and_step",
    "mean_stepping",
]

Decision = tuple[Verdict, float]
"""What was decided over a unit, and by what its common pseudo-gradient was multiplied."""

OwnedTerms = tuple[int, int, list[torch.Tensor]]
"""(number, unit, terms) of a run that this rank owns; the terms are those of `OuterShard`."""

Arrived = list[tuple[int, list[torch.Tensor]]]
"""(start, terms) of the runs that a rank owns of a segment."""


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

    overlap: torch.Tensor
    """fp64, (2,), zero: gets what the pseudo-gradient and the momentum have in common, see `OuterShard.prepare`."""

    observe: bool
    """Whether it does, over the whole model."""

    clock: RoundClock
    """Takes the times."""

    steps: Sequence[int] | None = None
    """How many steps every worker has made since the last round, where they differ."""

    options: dict[str, float] = field(default_factory=dict)
    """Of the outer optimizer, what changes from round to round, as it is in this one."""


class Round(Protocol):
    """One kind of round."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends in a round, in both directions."""

    def run(self, state: RoundState) -> list[Decision]:
        """Make a round; return what was decided over each unit, nothing for the plain mean."""


class BackgroundRound(Round, Protocol):
    """A round whose messages can travel while training continues; one at a time."""

    def start(self, state: RoundState) -> None:
        """Start to send the owners what is theirs; `state.flats` must not change until the end."""

    def turn(self, state: RoundState) -> list[Decision]:
        """Wait for what was sent, decide, make the outer step, and start to send the results back."""

    def finish(self, state: RoundState) -> None:
        """Wait for the results; they are in `state.flats` then."""


class PlainRound:
    """Steps by the mean of all workers, segment by segment, while other segments are in flight."""

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
            RuntimeError: a worker is non-finite, which has spread by then; the run must end without saving.
        """
        owned, segments = self._owned, self._owned.segments
        buffers = (packed(segment, state.flats) for segment in segments)
        arriving = through_owners(buffers, owned.group, mean_stepping(owned, state))
        for segment, buffer in zip(segments, arriving, strict=True):
            unpack(segment, buffer, state.flats)
        self._judge.add_up(state.squares)
        add_up_overlap(self._judge, state)
        self._judge.refuse_non_finite(state.squares[:-1], state.number)
        return []


def add_up_overlap(judge: Judge, state: RoundState) -> None:
    """Add up what pseudo-gradient and momentum have in common over the whole model, where that is observed.

    Before results are sent: small messages would wait behind them on the link, and training for both.
    """
    if state.observe:
        judge.add_up(state.overlap)


def mean_stepping(owned: OwnedRuns, state: RoundState) -> Combine:
    """Return what makes the outer step by the plain mean of the terms of a run that this rank owns."""

    def step(index: int, start: int, terms: list[torch.Tensor]) -> None:
        with state.clock.measure("applying"):
            squares = state.squares[:, owned.segments[index].unit]
            state.shard.mean_step(owned.number(index, start), terms, squares)

    return step


class GuardedRound:
    """Decides over every unit from all workers' norms, then reduces, clips and steps.

    The owners keep what they received until the norms over the whole model are known.
    """

    def __init__(self, owned: OwnedRuns, judge: Judge) -> None:
        self._owned = owned
        self._judge = judge
        self._memory = ExchangeMemory()
        self._exchanges: list[Exchange] = []

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends in a round."""
        return self._owned.bytes_sent

    def run(self, state: RoundState) -> list[Decision]:
        """Make a round.

        Raises:
            RuntimeError: a worker is non-finite, and is not to be left out.
        """
        self.start(state)
        decisions = self.turn(state)
        self.finish(state)
        return decisions

    def start(self, state: RoundState) -> None:
        """Start to send the owners what is theirs."""
        owned = self._owned
        self._exchanges = [
            Exchange(index, packed(segment, state.flats), owned.group, self._memory).start()
            for index, segment in enumerate(owned.segments)
        ]

    def turn(self, state: RoundState) -> list[Decision]:
        """Wait for what was sent, decide, make the outer step, and start to send the results back."""
        decisions, _ = decide_and_step(self._owned, self._judge, state, self._begin(self._exchanges))
        for exchange in self._exchanges:
            exchange.return_own()
        # The others' terms are not needed for the result's return, which may take some training steps.
        self._memory.clear()
        return decisions

    def finish(self, state: RoundState) -> None:
        """Wait for the results."""
        for segment, exchange in zip(self._owned.segments, self._exchanges, strict=True):
            unpack(segment, exchange.finish(), state.flats)
        self._exchanges = []

    def give_up(self) -> list[Exchange]:
        """Return the results in flight, by segment, to a caller that waits for them instead."""
        exchanges, self._exchanges = self._exchanges, []
        return exchanges

    def _begin(self, exchanges: list[Exchange]) -> Callable[[], Iterator[OwnedTerms]]:
        """Return an iterator of the runs that this rank owns; the first time while others are in flight."""
        arrived: list[Arrived] = []

        def each() -> Iterator[OwnedTerms]:
            for index, exchange in enumerate(exchanges):
                if index == len(arrived):
                    arrived.append(exchange.arrived())
                for start, terms in arrived[index]:
                    yield self._owned.number(index, start), self._owned.segments[index].unit, terms

        return each


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
        RuntimeError: a worker is non-finite, and is not to be left out.
    """
    shard, squares = state.shard, state.squares
    for run, unit, terms in each():
        with state.clock.measure("applying"):
            shard.measure(run, terms, squares[:-1, unit])
    judge.add_up(squares)
    verdicts = judge.verdicts(squares[:-1], state.number, state.steps)

    common: dict[int, torch.Tensor] = {}
    for run, unit, terms in each():
        with state.clock.measure("applying"):
            shard.reduce(run, terms, verdicts[unit], squares[-1, unit], state.number)
        common[run] = terms[owned.worker]
    judge.add_up(squares[-1])
    coefficients = judge.coefficients(squares[-1])

    with state.clock.measure("applying"):
        for run, own in common.items():
            unit = owned.segments[owned.numbered[run][0]].unit
            shard.step(run, own, coefficients[unit] if verdicts[unit].accepted else None)
    add_up_overlap(judge, state)
    return list(zip(verdicts, coefficients, strict=True)), common
