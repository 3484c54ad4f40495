# SPDX-License-Identifier: Apache-2.0
"""When the next round is due."""

from megatron_ext.sync_service.peer.interval import Interval
from megatron_ext.sync_service.peer.job import OneProcess


class Clock:
    """Shows what it is set to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ends_of(interval: Interval, clock: Clock, steps: list[float]) -> list[int]:
    """Return after which steps, of that many seconds each, a round was due."""
    ends = []
    for number, seconds in enumerate(steps, 1):
        clock.now += seconds
        if interval.count_step():
            ends.append(number)
            interval.restart()
    return ends


def test_steps_are_counted_whatever_they_take() -> None:
    clock = Clock()
    interval = Interval(OneProcess(), steps=3, seconds=None, clock=clock)
    assert ends_of(interval, clock, [100.0, 0.1] * 4) == [3, 6]
    assert interval.steps == 2


def test_by_time_a_round_is_due_at_the_first_step_that_ends_late_enough() -> None:
    clock = Clock()
    interval = Interval(OneProcess(), steps=None, seconds=10.0, clock=clock)
    assert ends_of(interval, clock, [4.0, 4.0, 4.0, 25.0, 9.9, 0.1]) == [3, 4, 6]


def test_an_interval_resumes_where_it_was_saved() -> None:
    clock = Clock()
    interval = Interval(OneProcess(), steps=None, seconds=10.0, clock=clock)
    interval.resume(5, 7.5)
    assert ends_of(interval, clock, [2.0, 0.5]) == [2]
    clock.now += 1.5
    assert interval.seconds == 1.5
