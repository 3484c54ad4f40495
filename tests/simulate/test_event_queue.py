# SPDX-License-Identifier: Apache-2.0
"""Transfers that share a link, in figures that can be checked by hand."""

import pytest

from megatron_ext.simulate.event_queue import EventQueue, SharedLink


def ends_of(begins: list[tuple[float, float]], capacity: float, each: float, cancelled: dict[int, float] | None = None):
    """Return when transfers are over, by number: each has a begin and its bytes."""
    queue = EventQueue()
    link = SharedLink(queue, capacity, each)
    ends, numbers = {}, {}

    def begin(place: int, nbytes: float) -> None:
        numbers[place] = link.begin(nbytes, lambda: ends.__setitem__(place, queue.now))

    for place, (time, nbytes) in enumerate(begins):
        queue.at(time, lambda place=place, nbytes=nbytes: begin(place, nbytes))
    for place, time in (cancelled or {}).items():
        queue.at(time, lambda place=place: link.cancel(numbers[place]))
    while queue.step():
        pass
    return ends


def test_transfers_share_a_link_equally_and_none_is_faster_than_its_own_end():
    assert ends_of([(0, 10)], capacity=10, each=2) == {0: 5}
    # Both at 5 per second; the second has 20 left when the first is over.
    assert ends_of([(0, 10), (0, 30)], capacity=10, each=10) == {0: 2, 1: 4}
    # The first is alone for a second.
    assert ends_of([(0, 20), (1, 20)], capacity=10, each=10) == {0: pytest.approx(3), 1: pytest.approx(4)}
    assert ends_of([(0, 10), (5, 10)], capacity=10, each=10) == {0: 1, 1: 6}


def test_a_transfer_that_ends_early_leaves_the_link_to_the_others():
    assert ends_of([(0, 20), (0, 20)], capacity=10, each=10, cancelled={0: 2}) == {1: pytest.approx(3)}


def test_what_is_planned_for_one_time_happens_in_order():
    queue, seen = EventQueue(), []
    for number in range(5):
        queue.at(1.0, lambda number=number: seen.append(number))
    while queue.step():
        pass
    assert seen == list(range(5))
