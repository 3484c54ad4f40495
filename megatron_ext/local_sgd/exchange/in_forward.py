# SPDX-License-Identifier: Apache-2.0
"""Rounds whose results are awaited unit by unit, where the next forward pass needs them.

A round by the plain mean is all in the forward pass: while one unit computes, the next one's results travel. Where
norms of the whole worker decide first, only the way home is: a pipeline's stages reach their units at different times,
so they could not decide together there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ext.local_sgd.exchange.judge import Judge
from megatron_ext.local_sgd.exchange.owned import OwnedRuns
from megatron_ext.local_sgd.exchange.rounds import (
    Decision,
    GuardedRound,
    RoundState,
    add_up_overlap,
    mean_stepping,
)
from megatron_ext.local_sgd.exchange.segment_memory import packed, unpack
from megatron_ext.transport.collectives import Exchange, ExchangeMemory

__all__ = ["ForwardRound"]


class ForwardRound:
    """A round of whole units that end one after the other, in the order in which they are asked for."""

    def __init__(self, owned: OwnedRuns, judge: Judge, *, guarded: bool) -> None:
        """Prepare.

        Args:
            owned: who owns what.
            judge: adds up the norms, and decides when `guarded`.
            guarded: whether the norms over the whole worker decide before anything is reduced.
        """
        self._owned = owned
        self._judge = judge
        self._guarded = GuardedRound(owned, judge) if guarded else None
        self._state: RoundState | None = None
        self._exchanges: dict[int, Exchange] = {}
        """By segment, what is in flight."""
        self._homeward: set[int] = set()

    @property
    def pending(self) -> bool:
        """Whether a round has been started and not concluded."""
        return self._state is not None

    def start(self, state: RoundState) -> list[Decision] | None:
        """Start to send the owners what is theirs.

        Returns:
            What was decided over each unit, where norms decide: the outer steps have been made then. Else None.

        Raises:
            RuntimeError: a worker is non-finite, and is not to be left out; where norms decide.
        """
        owned, memory = self._owned, ExchangeMemory()
        self._state, self._homeward = state, set()
        if self._guarded is None:
            self._exchanges = {
                index: Exchange(index, packed(segment, state.flats), owned.group, memory).start()
                for index, segment in enumerate(owned.segments)
            }
            return None
        self._guarded.start(state)
        decisions = self._guarded.turn(state)
        self._exchanges = dict(enumerate(self._guarded.give_up()))
        self._homeward = set(self._exchanges)
        return decisions

    def land(self, units: Sequence[int]) -> list[torch.Tensor]:
        """Wait for the results of these units; those of the next one are sent.

        Returns:
            The values, 1-D: with the results of all units that were asked for until now.
        """
        state = self._require_state()
        wanted = [index for index in self._exchanges if self._owned.segments[index].unit in units]
        with state.clock.measure("seconds"):
            for index in wanted + self._following(wanted):
                self._turn(index, state)
            for index in wanted:
                unpack(self._owned.segments[index], self._exchanges.pop(index).finish(), state.flats)
        return state.flats

    def conclude(self) -> RoundState | None:
        """End the round, all units of which have landed: add up the norms over the workers.

        Returns:
            What it worked on; None when `start` has said everything already.

        Raises:
            RuntimeError: a worker is non-finite; the run must end without saving.
        """
        state = self._require_state()
        assert not self._exchanges, "units are still in flight"
        self._state = None
        if self._guarded is not None:
            return None
        self._judge.add_up(state.squares)
        add_up_overlap(self._judge, state)
        self._judge.refuse_non_finite(state.squares[:-1], state.number)
        return state

    def _following(self, indices: Sequence[int]) -> list[int]:
        """Return the segments of the first unit in flight that comes after the units of these."""
        unit = {index: self._owned.segments[index].unit for index in self._exchanges}
        later = [other for other in unit.values() if indices and other > max(unit[index] for index in indices)]
        return [index for index, other in unit.items() if later and other == min(later)]

    def _turn(self, index: int, state: RoundState) -> None:
        if index not in self._homeward:
            self._homeward.add(index)
            self._exchanges[index].turn(mean_stepping(self._owned, state))

    def _require_state(self) -> RoundState:
        assert self._state is not None, "no round has been started"
        return self._state
