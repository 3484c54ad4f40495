# SPDX-License-Identifier: Apache-2.0
"""Ranks that run apart end after one iteration that all come to."""

import itertools
import math
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron_ext.transport.common_stop import CommonStop


class Yielding:
    """A store at which other ranks are served between a rank's calls, in an order drawn by chance."""

    def __init__(self, store, chance):
        self._store, self._chance = store, chance

    def __getattr__(self, name):
        for _ in range(self._chance.randrange(4)):
            self._store.check(["nothing"])  # gives up the interpreter's lock
        return getattr(self._store, name)


def last_iterations(seed, ranks, wishes, meeting=None):
    """Return after which iteration each rank ends.

    Args:
        seed: of the order in which ranks come to the store.
        ranks: how many.
        wishes: by rank, the iteration from which on it wants to end.
        meeting: the iteration before which each rank of an odd number rests, so that others are ahead.
    """
    store = dist.HashStore()

    def run(rank):
        chance = random.Random(f"{seed} {rank}")
        stop = CommonStop(Yielding(store, chance), "test", rank, ranks)
        for iteration in itertools.count(1):
            if iteration == meeting and rank % 2:
                for _ in range(chance.randrange(200)):
                    store.check(["nothing"])
            if stop.is_reached(iteration, wanted=iteration >= wishes.get(rank, math.inf)):
                return iteration
        raise AssertionError

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_end_after_one_iteration_whoever_wants_to_and_when(seed):
    chance = random.Random(seed)
    ranks = chance.randint(2, 6)
    wishes = {rank: chance.randint(1, 30) for rank in chance.sample(range(ranks), chance.randint(1, ranks))}
    ends = last_iterations(seed, ranks, wishes, meeting=chance.randint(1, 20))
    assert len(set(ends)) == 1, ends
    assert ends[0] > min(wishes.values())


def test_a_rank_that_is_behind_comes_to_where_the_first_one_is_and_no_further():
    store = dist.HashStore()
    ahead, behind = CommonStop(store, "test", 0, 2), CommonStop(store, "test", 1, 2)
    assert not behind.is_reached(1, wanted=False)
    assert [ahead.is_reached(iteration, wanted=False) for iteration in range(1, 9)] == [False] * 8
    # The first one has begun its ninth.
    ends = [behind.is_reached(iteration, wanted=True) for iteration in range(2, 10)]
    assert ends == [False] * 7 + [True]
    assert ahead.is_reached(9, wanted=False)


def test_iterations_that_are_not_asked_about_do_not_keep_a_rank_running():
    store = dist.HashStore()
    stop = CommonStop(store, "test", 0, 1)
    assert not stop.is_reached(1, wanted=True)
    assert stop.is_reached(5, wanted=True)
