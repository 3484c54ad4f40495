# SPDX-License-Identifier: Apache-2.0
"""The list of strategies of a run and their buckets: read, checked as a whole, and put in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_ext.errors import combine
from megatron_ext.hot_switch.strategies.strategy import Strategy
from megatron_ext.hot_switch.strategies.strategy_checks import (
    bucket_order,
    bucket_problems,
    model_problems,
    size_problems,
    sizes_are_usable,
)
from megatron_ext.params import GptShape

__all__ = ["Bucket", "StrategyList", "check_strategies", "parse_strategies", "read_strategies"]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """An interval of sequence lengths in tokens: longer than `above`, up to and including `up_to`."""

    above: int
    """Longest length that is too short for the bucket."""

    up_to: int
    """Longest length in the bucket, and the length of its packed rows."""


@dataclass(frozen=True, kw_only=True)
class StrategyList:
    """The strategies of a run, home first.

    Home trains the bucket of the longest sequences; the guests follow in the order in which they run: shortest
    bucket first. So strategy 0 has bucket 0 and strategy i has bucket n - i, when buckets are counted from the longest.
    """

    strategies: tuple[Strategy, ...]
    """Home, then the guests in the order in which they run."""

    buckets: tuple[Bucket, ...] = ()
    """The bucket of each strategy, in the order of `strategies`; empty when no bucket sizes were given."""

    @property
    def home(self) -> Strategy:
        """The strategy that owns the optimizer's state; it runs last."""
        return self.strategies[0]

    @property
    def execution_order(self) -> tuple[Strategy, ...]:
        """The strategies in the order in which a training step runs them: guests, then home."""
        return (*self.strategies[1:], self.strategies[0])

    @property
    def switches(self) -> tuple[tuple[Strategy, Strategy], ...]:
        """The switches of a training step in execution order, a closed chain from home to home.

        Empty for a single strategy.
        """
        if len(self.strategies) == 1:
            return ()
        return tuple(pairwise((self.home, *self.execution_order)))


def read_strategies(
    texts: Sequence[str],
    bucket_sizes: Sequence[int] | None = None,
    *,
    world_size: int | None = None,
    seq_length: int | None = None,
    shape: GptShape | None = None,
) -> StrategyList:
    """Read strategies of the form "dp,tp,pp" and check them together with everything else that is known.

    Args:
        texts: e.g. `["1,4,2", "8,1,1", "2,2,2"]`, home first.
        bucket_sizes: as for `check_strategies`.
        world_size: as for `check_strategies`.
        seq_length: as for `check_strategies`.
        shape: as for `check_strategies`.

    Raises:
        UserError: with all problems and their fixes.
    """
    strategies, problems = parse_strategies(texts)
    return check_strategies(
        strategies, bucket_sizes, world_size=world_size, seq_length=seq_length, shape=shape, problems=problems
    )


def check_strategies(
    strategies: Sequence[Strategy | None],
    bucket_sizes: Sequence[int] | None = None,
    *,
    world_size: int | None = None,
    whose_ranks: str = "the job",
    seq_length: int | None = None,
    shape: GptShape | None = None,
    problems: Sequence[str] = (),
) -> StrategyList:
    """Check strategies and bucket sizes against each other, the number of ranks and the model.

    Args:
        strategies: home first; None for one that could not be read, about which `problems` tells.
        bucket_sizes: bounds in tokens, descending from the longest sequence to 0; one more than strategies. None
            when there are no buckets.
        world_size: ranks that every strategy is for; None for those of the first strategy.
        whose_ranks: who has that many, for messages.
        seq_length: the run's --seq-length; None when it is not known.
        shape: the model; None when it is not known.
        problems: found by the caller before.

    Raises:
        UserError: with all problems and their fixes.
    """
    found = list(problems)
    if not strategies:
        found.append('there is no strategy; give at least one, e.g. "1,4,2" for DP 1, TP 4, PP 2')
    usable = []
    for strategy in strategies:
        if strategy is not None:
            complaints = size_problems(strategy)
            found += complaints
            if sizes_are_usable(strategy):
                usable.append(strategy)
    ranks = world_size if world_size is not None else (usable[0].world_size if usable else None)
    for strategy in usable:
        if strategy.world_size != ranks:
            whose = f"{whose_ranks} has" if world_size is not None else f"the first strategy, {usable[0].label}, has"
            found.append(
                f"strategy {strategy.label} is for {strategy.world_size} ranks, but {whose} {ranks}; every strategy "
                f"uses all of them, so choose sizes whose product dp*tp*pp*cp is {ranks}"
            )
        if shape is not None:
            found += model_problems(strategy, shape, usable)
    if bucket_sizes is not None:
        found += bucket_problems(bucket_sizes, strategies, seq_length)
    if found:
        raise combine(found, "hot-switch strategies")
    kept = tuple(strategy for strategy in strategies if strategy is not None)
    return StrategyList(strategies=kept, buckets=() if bucket_sizes is None else _buckets(bucket_sizes))


def parse_strategies(texts: Sequence[str]) -> tuple[list[Strategy | None], list[str]]:
    """Return strategies of the form "dp,tp,pp", None for those that cannot be read, and their problems."""
    problems: list[str] = []
    return [_parse(text, problems) for text in texts], problems


def _parse(text: str, problems: list[str]) -> Strategy | None:
    parts = text.replace(" ", "").split(",")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
        problems.append(
            f'strategy "{text}" is not of the form dp,tp,pp; write three numbers such as "1,4,2", and use a YAML file '
            f"for other fields"
        )
        return None
    dp, tp, pp = map(int, parts)
    return Strategy(dp=dp, tp=tp, pp=pp)


def _buckets(sizes: Sequence[int]) -> tuple[Bucket, ...]:
    longest_first = [Bucket(above=lower, up_to=upper) for upper, lower in pairwise(sizes)]
    return tuple(longest_first[number] for number in bucket_order(len(longest_first)))
