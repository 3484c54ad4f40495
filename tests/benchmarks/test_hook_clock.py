# SPDX-License-Identifier: Apache-2.0
"""The clock counts the wrappers' own time and nothing of what they wrap."""

import functools
import inspect

import pytest

from benchmarks import hook_clock
from benchmarks.hook_clock import HookClock


@pytest.fixture
def spend(monkeypatch):
    """Return a function that advances a pretended clock."""
    now = [0.0]
    monkeypatch.setattr(hook_clock.time, "perf_counter", lambda: now[0])

    def spend(seconds):
        now[0] += seconds

    return spend


def wrapping(spend, before, after):
    """Return a patch's `wrap` whose wrapper spends time around the original."""

    def wrap(original):
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            spend(before)
            try:
                return original(*args, **kwargs)
            finally:
                spend(after)

        return wrapper

    return wrap


def test_the_time_in_the_original_is_left_out(spend):
    clock = HookClock()

    def original(seconds):
        spend(seconds)
        return seconds

    wrapped = clock.wrapper(wrapping(spend, 1.0, 2.0))(original)
    spend(100.0)
    assert wrapped(50.0) == 50.0
    assert clock.seconds == 3.0
    assert list(inspect.signature(wrapped).parameters) == ["seconds"]


def test_wrappers_inside_originals_inside_wrappers_are_all_counted(spend):
    clock = HookClock()
    inner = clock.wrapper(wrapping(spend, 0.25, 0.5))(lambda: spend(50.0))

    def original():
        spend(10.0)
        inner()
        spend(10.0)

    clock.wrapper(wrapping(spend, 1.0, 2.0))(original)()
    assert clock.seconds == 3.75


def test_an_exception_stops_the_clock_too(spend):
    clock = HookClock()

    def original():
        spend(50.0)
        raise ValueError

    with pytest.raises(ValueError):
        clock.wrapper(wrapping(spend, 1.0, 2.0))(original)()
    spend(100.0)
    assert clock.seconds == 3.0


def test_what_is_not_a_function_is_patched_as_it_is():
    module, replacement = object(), object()
    wrapped = HookClock().wrapper(lambda original: replacement if original is module else None)(module)
    assert wrapped is replacement
