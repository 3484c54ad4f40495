# SPDX-License-Identifier: Apache-2.0
"""What a round moves: some of a rank's values, their anchor and outer state, and how they are exchanged.

One round, as in DiLoCo (arXiv 2311.08105, Algorithm 1): the pseudo-gradient of worker i is anchor - theta_i; its
mean over the workers is the gradient of the outer optimizer, which moves the anchor; every worker continues from
the new anchor.

The outer step is sharded over the workers. Every element has an owner among them: the others send it their theta_i,
it alone keeps the anchor and the outer state, makes the step, and sends the new anchor back. So a round costs the
traffic of one all-reduce, and anchor and momentum together take 8 / W bytes per element of the shard.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.exchange.compressed import CompressedRound
from megatron_ext.local_sgd.exchange.eager import EagerRound
from megatron_ext.local_sgd.exchange.in_forward import ForwardRound
from megatron_ext.local_sgd.exchange.judge import Judge
from megatron_ext.local_sgd.exchange.outer_state import OuterState, SyncedTensor
from megatron_ext.local_sgd.exchange.owned import OwnedRuns
from megatron_ext.local_sgd.exchange.pairwise import PairwiseRound
from megatron_ext.local_sgd.exchange.rounds import (
    BackgroundRound,
    Decision,
    GuardedRound,
    PlainRound,
    Round,
    RoundState,
)
from megatron_ext.local_sgd.exchange.segment_memory import flattened, put_back
from megatron_ext.local_sgd.exchange.segments import plan_segments
from megatron_ext.local_sgd.exchange.summary import summarize
from megatron_ext.local_sgd.reporting.round_report import RoundClock, RoundReport
from megatron_ext.outer.codecs.all_codecs import build_codec
from megatron_ext.outer.codecs.codec import Codec
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.penalty import Penalty
from megatron_ext.outer.reducer_config import GTAConfig
from megatron_ext.transport.collectives import SEGMENT_NUMEL, ordered_sum

__all__ = ["Fragment"]

# Tensors below this many elements are packed: a message of their own would cost more than the copy.
SMALL_NUMEL = 1 << 14


@dataclass(kw_only=True)
class _Flight:
    """A round in flight."""

    state: RoundState | None = None
    """What it works on, until the result is there."""

    reduced: bool = False
    """Whether the outer step was made."""

    result: list[torch.Tensor] | None = None
    """The values that all workers agreed on, 1-D, once they are there."""

    non_finite: list[int] = field(default_factory=list)
    """The workers with non-finite values."""

    def require_state(self) -> RoundState:
        """Return the state."""
        assert self.state is not None, "the result is there already"
        return self.state


class Fragment:
    """Some of a rank's values in flight through rounds."""

    def __init__(
        self,
        synced: Sequence[SyncedTensor],
        *,
        units: Sequence[str],
        config: LocalSGDConfig,
        outer: OuterOptimizerConfig,
        gta: GTAConfig,
        across: Any,
        inside: Any,
        device: torch.device,
        index: int = 0,
        fragments: int = 1,
        guarded: bool = False,
        eager: bool = False,
        observe: bool = False,
    ) -> None:
        """Prepare; no memory is taken before `begin`.

        Args:
            synced: this rank's tensors of it; may be none.
            units: its units in model order; the same on all ranks, also where a rank holds no tensor of a unit.
            config: workers, penalty and codec.
            outer: the outer optimizer.
            gta: how pseudo-gradients become one.
            across: process group of the ranks that hold the same values, one per worker, in worker order.
            inside: process group of all ranks of this worker; None when it is this one alone.
            device: where norms are added up.
            index: which fragment it is.
            fragments: how many there are, each with a round in every interval.
            guarded: whether rounds must not reduce before all messages are there, because they travel while training
                continues, or because workers have different weights.
            eager: whether a worker steps by its own share at once, and by the others' a round later.
            observe: compare every pseudo-gradient with the outer momentum, for the report.
        """
        self.units = tuple(units)
        self.values = [entry.tensor for entry in synced]
        self._across = across
        self._device = device
        self._index = index
        self._outer = outer
        self._fragments = fragments
        # Whether every worker has an anchor and an outer state of its own, so that there is no common step to observe.
        apart = eager or gta.in_pairs
        self._observe = observe and not apart
        self._flight: _Flight | None = None
        self._penalty = Penalty(config, workers=dist.get_world_size(across), units=len(self.units))
        self._judge = judge = Judge(
            self._penalty, self.units, clip=config.clip_pseudo_grad, across=across, inside=inside
        )
        segments = plan_segments(
            [value.numel() for value in self.values],
            [self.units.index(entry.unit) for entry in synced],
            limit=SEGMENT_NUMEL,
            small=SMALL_NUMEL,
        )
        self._owned = owned = OwnedRuns(segments, across, apart=apart)
        self._compressed = None if config.codec is None else _compressed(config.codec, config, synced, owned, judge)
        self._eager = EagerRound(owned, judge, device) if eager else None
        self._background: BackgroundRound = self._compressed or GuardedRound(owned, judge)
        plain = self._compressed is None and not config.has_penalty and gta.is_mean and not guarded
        self._in_forward = ForwardRound(owned, judge, guarded=not plain) if config.sync_in_forward else None
        self._round: Round = self._background
        if self._eager is not None:
            self._round = self._eager
        elif apart:
            self._round = PairwiseRound(owned, judge)
        elif plain:
            self._round = PlainRound(owned, judge)
        self.state = OuterState(
            synced,
            owned,
            self._penalty,
            outer=outer,
            gta=gta,
            compressed=self._compressed,
            eager=self._eager,
            device=device,
            offload=config.cpu_offload,
        )

    def sync(self, number: int, steps: Sequence[int] | None = None) -> RoundReport:
        """Run one round: collect, guard, reduce, outer step, apply.

        Args:
            number: of the round, from 1.
            steps: how many every worker has made since the last round, where they differ.

        Raises:
            RuntimeError: a worker brought non-finite weights, and nothing was asked for that could leave it
                out. They have spread by then; the run must end without saving.
        """
        clock = RoundClock()
        with clock.measure("seconds"):
            if not self._owned.apart:
                self._wait(clock)
            state = self._state(number, flattened(self.values), clock, steps)
            state.shard.prepare(state.overlap if state.observe else None, state.options)
            decisions = self._round.run(state)
            put_back(state.flats, self.values)
        return self._report(state, decisions)

    def _wait(self, clock: RoundClock) -> None:
        """Wait until all workers have come."""
        with clock.measure("waiting"):
            arrival = torch.zeros((), device=self._device)
            dist.all_reduce(arrival, group=self._across)
            arrival.item()  # on a GPU the reduction has only been launched before

    # What it costs.

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends in a round, in both directions."""
        return self._round.bytes_sent

    @property
    def message_bytes(self) -> int:
        """Bytes of what is received in a round and not used up yet, at most, by arithmetic.

        Coded messages are kept on both sides; others are received next to the values that they answer to, for all of
        the fragment at once unless a plain mean takes them segment by segment.
        """
        if self._compressed is not None:
            return self._round.bytes_sent
        numel = sum(value.numel() for value in self.values)
        if isinstance(self._round, PlainRound):
            numel = min(numel, 2 * SEGMENT_NUMEL)
        return 4 * numel * (self._owned.workers - 1) // self._owned.workers

    # A round that ends in the next forward pass.

    def launch(self, number: int) -> RoundReport | None:
        """Begin a round with the present values, which belong to it until `land` has put the results there.

        Args:
            number: of the round, from 1.

        Returns:
            Its report, where norms decide, so that the outer steps have been made; else `conclude` returns it.

        Raises:
            RuntimeError: as `sync`, where norms decide.
        """
        assert self._in_forward is not None
        clock = RoundClock()
        with clock.measure("seconds"):
            state = self._state(number, flattened(self.values), clock)
            state.shard.prepare(state.overlap if state.observe else None, state.options)
            decisions = self._in_forward.start(state)
        return None if decisions is None else self._report(state, decisions)

    def land(self, units: Sequence[str]) -> None:
        """Wait until the results of these units are among the values."""
        if self._in_forward is not None and self._in_forward.pending:
            flats = self._in_forward.land([self.units.index(unit) for unit in units if unit in self.units])
            put_back(flats, self.values)

    def conclude(self) -> RoundReport | None:
        """End the round that was launched, if there is one; all ranks must call it at the same place.

        Returns:
            Its report, unless `launch` has returned it.

        Raises:
            RuntimeError: as `sync`.
        """
        if self._in_forward is None or not self._in_forward.pending:
            return None
        self.land(self.units)
        state = self._in_forward.conclude()
        return None if state is None else self._report(state, [])

    # A round in the background.

    def send(self, number: int) -> None:
        """Begin a round with the present values; training continues with them.

        Args:
            number: of the round, from 1.
        """
        assert self._flight is None, "the last round of this fragment is still in flight"
        clock = RoundClock()
        with clock.measure("seconds"):
            state = self._state(number, [flat.clone() for flat in flattened(self.values)], clock)
            self._background.start(state)
        self._flight = _Flight(state=state)

    def turn(self) -> RoundReport:
        """Make the outer step of the round in flight with what the workers sent, and start to send the result back.

        Raises:
            RuntimeError: as `sync`.
        """
        flight = self._require_flight()
        state = flight.require_state()
        with state.clock.measure("seconds"):
            state.shard.prepare(state.overlap if state.observe else None, state.options)
            decisions = self._background.turn(state)
        flight.reduced = True
        report = self._report(state, decisions)
        flight.non_finite = report.non_finite
        return report

    def turn_late(self) -> None:
        """Send the others what is theirs of an eager round; nothing for other rounds."""
        if self._eager is not None:
            self._eager.turn()

    def receive(self) -> None:
        """Wait for the result of the round in flight."""
        flight = self._require_flight()
        state = flight.require_state()
        self._background.finish(state)
        flight.result, flight.state = state.flats, None

    def apply(self, alpha: float) -> None:
        """End the round in flight: continue from alpha * own values + (1 - alpha) * result.

        A worker that sent non-finite values takes the result alone.
        """
        flight = self._require_flight()
        own = 0.0 if self._owned.worker in flight.non_finite else alpha
        assert flight.result is not None, "the result has not been received"
        for value, result in zip(self.values, flight.result, strict=True):
            if own == 0:
                value.copy_(result.view(value.shape))
            else:
                value.lerp_(result.view(value.shape), 1 - own)
        self._flight = None

    @property
    def phase(self) -> Literal["idle", "sending", "reduced", "gathered"]:
        """Where the round in flight is; idle while there is none."""
        if self._flight is None:
            return "idle"
        if self._flight.result is not None:
            return "gathered"
        return "reduced" if self._flight.reduced else "sending"

    @property
    def non_finite(self) -> list[int]:
        """The workers with non-finite values in the round in flight, once it is reduced."""
        return [] if self._flight is None else self._flight.non_finite

    def resume(self, non_finite: list[int]) -> None:
        """Take the anchor for the result of a round in flight, as it is when the outer step was made before a save.

        Args:
            non_finite: the property of that name, at the time of the save.
        """
        self._flight = _Flight(reduced=True, result=flattened(self.state.gather_anchor()), non_finite=non_finite)

    def _require_flight(self) -> _Flight:
        assert self._flight is not None, "no round of this fragment is in flight"
        return self._flight

    def _state(
        self, number: int, flats: list[torch.Tensor], clock: RoundClock, steps: Sequence[int] | None = None
    ) -> RoundState:
        """Return what a round works on."""
        rows, device = self._owned.workers + 1, self._device
        return RoundState(
            number=number,
            shard=self.state.shard,
            flats=flats,
            squares=torch.zeros(rows, len(self.units), dtype=torch.float64, device=device),
            overlap=torch.zeros(2, dtype=torch.float64, device=device),
            observe=self._observe,
            clock=clock,
            steps=steps,
            options=self._outer.options_of_round((number - 1) // self._fragments + 1),
        )

    def _report(self, state: RoundState, decisions: Sequence[Decision]) -> RoundReport:
        """Return the report of the round whose outer steps have just been made."""
        state.shard.release()
        return summarize(
            state,
            fragment=self._index,
            units=self.units,
            decisions=decisions,
            bytes_sent=self.bytes_sent,
        )

    # The end of training.

    def unite(self) -> bool:
        """Make the workers equal without an outer step: all continue from the mean of their values, as a new anchor.

        What the others still have to give in eager rounds is subtracted first, as it is.

        Workers with non-finite values do not count; when none are finite, all go back to the anchor.

        Returns:
            Whether this worker's values were finite.

        Raises:
            RuntimeError: a worker's values are non-finite, and no option asks to leave it out.
        """
        for value, late in zip(self.values, self.state.take_late(), strict=False):
            value.sub_(late)
        found = [value.sum(dtype=torch.float64) for value in self.values]
        sums = torch.stack(found or [torch.zeros(1, device=self._device)])
        squares = torch.zeros(self._owned.workers, 1, dtype=torch.float64, device=self._device)
        squares[self._owned.worker] = torch.where(torch.isfinite(sums).all(), 0.0, math.nan)
        self._judge.add_up(squares)
        finite = torch.isfinite(squares).view(-1).tolist()
        if not all(finite) and not self._penalty.tolerates_non_finite_workers:
            worker = finite.index(False)
            raise RuntimeError(f"worker {worker} has non-finite weights at the end of training")
        own = finite[self._owned.worker]
        flats = flattened(self.values) if any(finite) else flattened(self.state.gather_anchor())
        for flat in flats if any(finite) else []:
            flat.div_(sum(finite)) if own else flat.zero_()
            ordered_sum(flat, self._across)
        for value, flat in zip(self.values, flats, strict=True):
            value.copy_(flat.view(value.shape))
        self.state.move_to_values()
        return bool(own)

    def go_back(self, workers: Container[int]) -> None:
        """Let these workers continue from the anchor; all ranks of `across` must call it, with the same workers."""
        for value, anchor in zip(self.values, self.state.gather_anchor(), strict=True):
            if self._owned.worker in workers:
                value.copy_(anchor.view(value.shape))


def _compressed(
    codec: str, config: LocalSGDConfig, synced: Sequence[SyncedTensor], owned: OwnedRuns, judge: Judge
) -> CompressedRound:
    outward = build_codec(codec, config.codec_density)
    homeward = outward.for_results(owned.workers)
    return CompressedRound(
        owned,
        judge,
        outward=[_for(entry, outward) for entry in synced],
        homeward=[_for(entry, homeward) for entry in synced],
    )


def _for(entry: SyncedTensor, codec: Codec) -> Codec:
    """Return the codec of a tensor: on two stages one that codes every value by itself."""
    return build_codec("bf16") if entry.on_two_stages and codec.grid > 1 else codec
