# SPDX-License-Identifier: Apache-2.0
"""The values of rounds as they follow from who counted in them: worked out in one process, without a server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megatron_ext.outer.optimizers.sgd import OuterSGD
from tests.chaos.settings import BATCH, STEPS, Settings
from tests.chaos.task import Task, Values

__all__ = ["faultless", "replayed"]

Contribution = tuple[int, int]
"""(index, samples of its part before the interval)."""


def replayed(settings: Settings, task: Task, rounds: Iterable[Sequence[Contribution]]) -> Iterator[Values]:
    """Yield the values of the common start, and of each round after it.

    Args:
        settings: of the run.
        task: of the run.
        rounds: who counted in a round, from round 1 on, in the order of the indices.
    """
    values = {name: value.clone() for name, value in task.start.items()}
    momentum = settings.outer_momentum
    optimizers = {
        name: OuterSGD([value.view(-1)], lr=0.7, momentum=momentum, nesterov=True)
        for name, value in values.items()
        if momentum is not None
    }
    yield values
    for contributions in rounds:
        trained = [task.interval(values, index, settings.peers, begin)[0] for index, begin in contributions]
        before, values = values, {name: value.clone() for name, value in values.items()}
        for name, value in values.items() if trained else ():
            flat = value.view(-1)
            terms = [found[name].view(-1) for found in trained]
            if momentum is None:
                flat.copy_(sum(terms[1:], terms[0]) / len(terms))
            else:
                terms = [before[name].view(-1) - term for term in terms]
                optimizer = optimizers[name]
                optimizer._anchors = [flat]
                optimizer.step(0, slice(0, flat.numel()), sum(terms[1:], terms[0]) / len(terms))
        yield values


def faultless(settings: Settings, task: Task, rounds: int) -> Values:
    """Return the values after a number of rounds in which everybody counted."""
    size = STEPS * BATCH
    if settings.asynchronous:
        # N contributions of asynchronous rounds move the values about as one round of N peers does.
        rounds = rounds // settings.peers
    every = [[(index, number * size) for index in range(settings.peers)] for number in range(rounds)]
    *_, values = replayed(settings, task, every)
    return values
