# SPDX-License-Identifier: Apache-2.0
"""Choosing buckets and strategies before a run: the quickest list that fits, against the quickest single strategy.

Every list is tried: all ways to cut the lengths at the candidate bounds, and in each bucket the strategies that are
quickest for it. HotSPa's own lists were chosen by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Self

from megatron_ext.errors import UserError
from megatron_ext.hot_switch.cost_model.step_time import StepParts, StepTimes
from megatron_ext.hot_switch.cost_model.suggestion import Suggestion
from megatron_ext.hot_switch.data.packing import plan_batch
from megatron_ext.hot_switch.planning.figures import SwitchFigures, measure_plan
from megatron_ext.hot_switch.planning.plan import plan_switch
from megatron_ext.hot_switch.strategies.strategy import Strategy
from megatron_ext.hot_switch.strategies.strategy_list import Bucket, StrategyList, check_strategies

__all__ = ["Suggester", "candidates"]

_PER_BUCKET = 3
"""Strategies that are tried in a bucket: the quickest. A slower one could win by its switches only."""

_GRADIENT_BYTES = 2.0
"""Bytes of an fp32 gradient by those of the bf16 parameters that plans count."""


def candidates(times: StepTimes, gpus: int) -> list[Strategy]:
    """Return the strategies that the model allows on that many GPUs: TP a power of two, any PP that divides the layers.

    Where there are measured times, those alone that have some: what is modelled for an ideal machine would win against
    what a real one takes.

    Sequence parallelism is on wherever TP is above 1: the memory of activations is counted so.
    """
    shape, found = times.times.shape, []
    for tp in (2**power for power in range(gpus.bit_length())):
        for pp in range(1, shape.num_layers + 1):
            if gpus % (tp * pp) or shape.num_layers % pp:
                continue
            if times.times.measured and (tp, pp) not in times.times.measured:
                continue
            strategy = Strategy(dp=gpus // (tp * pp), tp=tp, pp=pp, sequence_parallel=tp > 1)
            try:
                check_strategies([strategy], world_size=gpus, shape=shape)
            except UserError:
                continue
            found.append(strategy)
    return found


class Suggester:
    """Compares lists of strategies on one global batch.

    Attributes:
        times: of the strategies.
        gpus: of the job.
        lengths: positions of every sequence of the batch.
        context: the longest bucket's rows.
        homes: the strategies that can train alone.
    """

    def __init__(self, times: StepTimes, *, gpus: int, lengths: Sequence[int], context: int) -> None:
        """Prepare.

        Args:
            times: of the strategies.
            gpus: of the job.
            lengths: positions of every sequence of the batch, none longer than `context`.
            context: longest sequence that has to fit, and the longest bucket's rows.

        Raises:
            UserError: no strategy is possible, or none can be home.
        """
        self.times = times
        self.gpus = gpus
        self.lengths = lengths
        self.context = context
        self._strategies = candidates(times, gpus)
        if not self._strategies:
            measured = ", ".join(f"{tp},{pp}" for tp, pp in sorted(times.times.measured))
            raise UserError(
                f"no (TP, PP) that was measured ({measured}) is possible for this model on {gpus} GPUs; measure those "
                "that are with `megatron-ext hot-switch profile`"
            )
        # Megatron counts home's micro-batches by the batch.
        self.homes = [strategy for strategy in self._strategies if len(lengths) % strategy.dp == 0]
        if not self.homes:
            least = min(strategy.dp for strategy in self._strategies)
            near = max(len(lengths) // least, 1) * least
            raise UserError(
                f"--global-batch-size {len(lengths)} is not a multiple of the data parallel size of any strategy for "
                f"this model on {gpus} GPUs, and home's has to divide it; give {near} or {near + least}"
            )
        self._switches: dict[tuple[Strategy, Strategy], SwitchFigures] = {}

    def on(self, lengths: Sequence[int]) -> Self:
        """Return the same for another batch of as many sequences.

        Args:
            lengths: positions of every one.
        """
        other = copy.copy(self)
        other.lengths = lengths
        return other

    @property
    def unused(self) -> list[tuple[int, int]]:
        """The (TP, PP) that were measured and are not possible for this model on that many GPUs."""
        return sorted({*self.times.times.measured} - {(strategy.tp, strategy.pp) for strategy in self._strategies})

    def static(self) -> list[Suggestion]:
        """Return every single strategy that fits, the quickest first; all sequences are packed into full rows.

        Raises:
            UserError: none fits.
        """
        bounds = (self.context, 0)
        found = [self.estimate([strategy], bounds) for strategy in self.homes if self._fits(strategy, strategy)]
        if not found:
            least = min(self.times.memory(strategy, self.context, strategy) for strategy in self.homes)
            available = self.times.times.machine.memory
            if least <= available:
                raise UserError(
                    f"rows of {self.context} positions cannot be cut by any tensor-parallel size with which the model "
                    f"fits on {self.gpus} GPUs; change --context to a multiple of 2, better of 64"
                )
            raise UserError(
                f"sequences of {self.context} positions need {least / 2**30:.1f} GiB per GPU at least, and there are "
                f"{available / 2**30:.1f}: use more GPUs, a shorter context"
                + ("" if self.times.times.recompute == "full" else ", or --recompute full")
            )
        return sorted(found, key=lambda suggestion: suggestion.seconds)

    def best(self, bounds: Sequence[int]) -> Suggestion:
        """Return the quickest list of strategies over all ways to cut the lengths.

        Args:
            bounds: lengths at which to cut, each below `context`.

        Raises:
            UserError: nothing fits.
        """
        lists = [self.static()[0]]
        inner = sorted({bound for bound in bounds if 0 < bound < self.context}, reverse=True)
        for count in range(1, len(inner) + 1):
            for cut in combinations(inner, count):
                lists += self._with_bounds((self.context, *cut, 0))
        return min(lists, key=lambda suggestion: suggestion.seconds)

    def estimate(self, strategies: Sequence[Strategy], bounds: Sequence[int]) -> Suggestion:
        """Return the estimated time of a step.

        Args:
            strategies: home first, in the order of `StrategyList`.
            bounds: of the buckets, descending to 0.
        """
        listed = check_strategies(strategies, bounds, world_size=self.gpus, shape=self.times.times.shape)
        batches = plan_batch(self.lengths, listed)
        parts = [
            StepParts() if batch is None else self.times.parts(strategy, batch, self.lengths)
            for strategy, batch in zip(listed.strategies, batches, strict=True)
        ]
        # A guest without data is skipped.
        trained = [strategy for strategy, batch in zip(listed.strategies, batches, strict=True) if batch is not None]
        switching, moved = self._switching(StrategyList(strategies=tuple(trained)))
        return Suggestion(
            strategies=listed,
            parts=tuple(parts),
            switching=switching,
            moved=moved,
            memory=self.memory(listed),
            sequences=tuple(self._sequences(bucket) for bucket in listed.buckets),
            positions=tuple(0 if batch is None else batch.positions for batch in batches),
        )

    def _with_bounds(self, bounds: tuple[int, ...]) -> Iterator[Suggestion]:
        """Yield lists of different strategies for these buckets."""
        by_length = [Bucket(above=lower, up_to=upper) for upper, lower in pairwise(bounds)]
        if not all(self._sequences(bucket) for bucket in by_length[1:]):
            return  # a guest without data
        homes = [strategy for strategy in self.homes if self._fits(strategy, strategy, switches=True)]
        for home in self._quickest(homes, by_length[0]):
            guests = [
                self._quickest(
                    [
                        strategy
                        for strategy in self._strategies
                        if self._fits(strategy, home, bucket.up_to, switches=True)
                    ],
                    bucket,
                )
                for bucket in by_length[1:]
            ]
            for chosen in product(*guests):
                if len({home, *chosen}) < len(bounds) - 1:
                    continue
                # Home has the longest sequences; the guests run from the shortest ones on.
                found = self.estimate([home, *reversed(chosen)], bounds)
                if max(found.memory) <= self.times.times.machine.memory:
                    yield found

    def _quickest(self, strategies: Sequence[Strategy], bucket: Bucket) -> list[Strategy]:
        return sorted(strategies, key=lambda strategy: self._alone(strategy, bucket))[:_PER_BUCKET]

    def _alone(self, strategy: Strategy, bucket: Bucket) -> float:
        """Return the time of a strategy for the sequences of a bucket."""
        within = [length for length in self.lengths if bucket.above < length <= bucket.up_to]
        alone = StrategyList(strategies=(strategy,), buckets=(Bucket(above=0, up_to=bucket.up_to),))
        (batch,) = plan_batch(within, alone)
        assert batch is not None, "the first strategy of a list always has a batch"
        return self.times.seconds(strategy, batch, within)

    def _sequences(self, bucket: Bucket) -> int:
        return sum(bucket.above < length <= bucket.up_to for length in self.lengths)

    def _fits(
        self, strategy: Strategy, home: Strategy, positions: int | None = None, *, switches: bool = False
    ) -> bool:
        longest = self.context if positions is None else positions
        if strategy.sequence_parallel and longest % strategy.tp:
            return False  # its rows could not be cut
        return self.times.memory(strategy, longest, home, switches=switches) <= self.times.times.machine.memory

    def memory(self, listed: StrategyList) -> tuple[float, ...]:
        """Return the bytes of the fullest GPU in every strategy's turn."""
        home, switches = listed.home, len(listed.strategies) > 1
        receives = [False] * len(listed.strategies)
        for number, (before, guest) in enumerate(pairwise(listed.strategies[1:]), 2):
            chained, direct = self._switch(before, guest), self._switch(before, home)
            receives[number] = chained.bytes_total < direct.bytes_total
        return tuple(
            self.times.memory(strategy, bucket.up_to, home, switches=switches, receives=waits)
            for strategy, bucket, waits in zip(listed.strategies, listed.buckets, receives, strict=True)
        )

    def _switching(self, listed: StrategyList) -> tuple[float, float]:
        """Return the time of a step's switches and the bytes they move, each by the way that moves fewer.

        Parameters come from home or from the guest before, gradients go home or to the guest after. Home keeps its
        parameters.
        """
        home, links = listed.home, self.times.times.machine.links
        parameters = [self._shorter((home, guest), (before, guest)) for before, guest in listed.switches[:-1]]
        gradients = [self._shorter((guest, home), (guest, after)) for guest, after in listed.switches[1:]]
        weighted = [(1.0, figures) for figures in parameters] + [(_GRADIENT_BYTES, figures) for figures in gradients]
        return (
            sum((factor * figures.seconds(links) for factor, figures in weighted), 0.0),
            sum((factor * figures.bytes_total for factor, figures in weighted), 0.0),
        )

    def _shorter(self, direct: tuple[Strategy, Strategy], chained: tuple[Strategy, Strategy]) -> SwitchFigures:
        return min(self._switch(*direct), self._switch(*chained), key=lambda switch: switch.bytes_total)

    def _switch(self, source: Strategy, target: Strategy) -> SwitchFigures:
        # What they compute again changes nothing in what they hold.
        source, target = (replace(strategy, recompute="none") for strategy in (source, target))
        if (source, target) not in self._switches:
            shape, machine = self.times.times.shape, self.times.times.machine
            layouts = source.layout(shape.num_layers), target.layout(shape.num_layers)
            plan = plan_switch(shape, *layouts, gpus_per_node=machine.gpus_per_node)
            self._switches[source, target] = measure_plan(plan)
        return self._switches[source, target]
