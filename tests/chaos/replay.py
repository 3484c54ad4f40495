# SPDX-License-Identifier: Apache-2.0
"""The values of rounds as they follow from who counted in them: worked out in one process, without a server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_ext.outer.optimizers.delayed_nesterov import DelayedNesterov
from megatron_ext.outer.optimizers.sgd import OuterSGD
from megatron_ext.spes import merge_experts
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.values.guards import Guards, Judged
from megatron_ext.sync_service.values.tensor_round import square_of
from tests.chaos.settings import BATCH, OUTER_RATE, STEPS, Settings, peer_name
from tests.chaos.task import Task, Values

__all__ = ["Contribution", "faultless", "replayed"]


_KEPT = 1000
"""Rounds whose values an interval may begin with."""


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """An interval that counted in a round."""

    index: int
    """Whose part of the samples it took."""
    begin: int
    """Samples of the part before it."""
    made_for: int
    """The round after that whose values it began with."""


def replayed(settings: Settings, task: Task, rounds: Iterable[Sequence[Contribution]]) -> Iterator[Values]:
    """Yield the values of the common start, and of each round after it.

    Args:
        settings: of the run.
        task: of the run.
        rounds: what counted in a round, from round 1 on, in the order of the indices.
    """
    values = {name: value.clone() for name, value in task.start.items()}
    outer = (_Asynchronous if settings.asynchronous else _Synchronous)(settings, task)
    run = RunConfig(**settings.run_config())
    found = {0: values}
    yield values
    for number, contributions in enumerate(rounds, 1):
        moved = []
        for entry in contributions:
            base = found[entry.made_for - 1]
            trained, _ = task.interval(base, entry.index, settings.peers, entry.begin)
            moved.append((entry.index, base, trained))
        if moved:
            outer.move(moved)
        alpha = 0.0 if run.merging is None else run.merging.alpha(run.merge_step(number))
        if alpha:
            outer.values.update(merge_experts(outer.values, alpha=alpha, topk=run.merge_topk))
        found[number] = {name: value.clone() for name, value in outer.values.items()}
        found.pop(number - _KEPT, None)
        yield found[number]


class _Synchronous:
    """The mean of the peers' values, or an outer step by the mean of their pseudo-gradients."""

    def __init__(self, settings: Settings, task: Task) -> None:
        self.values = {name: value.clone() for name, value in task.start.items()}
        self._catalog = task.catalog
        momentum = settings.outer_momentum
        self._optimizers = {
            name: OuterSGD([value.view(-1)], lr=OUTER_RATE, momentum=momentum, nesterov=True)
            for name, value in self.values.items()
            if momentum is not None and not self._catalog[name].owners
        }
        # It learns from round to round, without an interruption.
        penalty = RunConfig(**settings.run_config()).penalty
        self._guards = Guards(penalty, self._catalog, settings.peers, None) if settings.guarded else None

    def move(self, contributions: Sequence[tuple[int, Values, Values]]) -> None:
        """Make the next values, given each peer's index, what it began with and what it made of it."""
        if self._guards is not None:
            self._judge(self._guards, contributions)
        for name, anchor in self.values.items():
            spec = self._catalog[name]
            weight_of = {index: 1.0 for index, _, _ in contributions if spec.is_trained_by(index)}
            if self._guards is not None:
                verdict = self._guards.verdicts[spec.judged_as]
                verdict = verdict.among(weight_of) if spec.owners else verdict
                weight_of = dict(zip(verdict.accepted, verdict.weights, strict=True))
            counted = [(weight_of[index], trained) for index, _, trained in contributions if index in weight_of]
            if not counted:
                continue
            terms = [trained[name] for _, trained in counted]
            if name in self._optimizers:
                terms = [anchor - term for term in terms]
            mean = _mean(terms, [weight for weight, _ in counted])
            if name in self._optimizers:
                self._optimizers[name].step(0, slice(0, anchor.numel()), mean.view(-1))
            else:
                anchor.copy_(mean)

    def _judge(self, guards: Guards, contributions: Sequence[tuple[int, Values, Values]]) -> None:
        squares: dict[int, dict[Judged, float]] = {}
        for index, _, trained in contributions:
            of_peer = squares.setdefault(index, {})
            for spec in self._catalog:
                if spec.is_trained_by(index):
                    square = square_of((self.values[spec.name] - trained[spec.name]).view(-1))
                    of_peer[spec.judged_as] = of_peer.get(spec.judged_as, 0.0) + square
        guards.decide(squares, {}, {index: peer_name(index) for index in squares}, None)


def _mean(terms: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted mean of terms: written out here, so that it checks the product's."""
    shares = [weight / max(weights) for weight in weights]
    products = [term * share for term, share in zip(terms, shares, strict=True)]
    return sum(products[1:], products[0]) / sum(shares)


class _Asynchronous:
    """One contribution after the other, with delayed Nesterov."""

    def __init__(self, settings: Settings, task: Task) -> None:
        self.values = {name: value.clone() for name, value in task.start.items()}
        self._catalog = task.catalog
        rate, momentum = (1.0, 0.0) if settings.outer_momentum is None else (OUTER_RATE, settings.outer_momentum)
        self._optimizers = {
            name: DelayedNesterov([value.view(-1)], lr=rate, momentum=momentum, count=settings.peers)
            for name, value in self.values.items()
            if not self._catalog[name].owners
        }

    def move(self, contributions: Sequence[tuple[int, Values, Values]]) -> None:
        """Make the next values, given what the one peer began with and what it made of it."""
        ((index, base, trained),) = contributions
        for name, anchor in self.values.items():
            gradient = base[name] - trained[name]
            if name in self._optimizers:
                self._optimizers[name].step(0, slice(0, gradient.numel()), gradient.view(-1))
            elif self._catalog[name].is_trained_by(index):
                anchor -= gradient


def faultless(settings: Settings, task: Task, rounds: int) -> Values:
    """Return the values after a number of rounds in which everybody counted, in turn where rounds are asynchronous."""
    peers, size = settings.peers, STEPS * BATCH
    every = []
    for number in range(1, rounds + 1):
        turn, index = divmod(number - 1, peers)
        if settings.asynchronous:
            base = max(0, number - peers)
            every.append([Contribution(index=index, begin=turn * size, made_for=base + 1)])
        else:
            begin = (number - 1) * size
            every.append([Contribution(index=index, begin=begin, made_for=number) for index in range(peers)])
    *_, values = replayed(settings, task, every)
    return values
