# SPDX-License-Identifier: Apache-2.0
"""Which of many cases of one promise run each time."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def one_of_each(cases: Sequence[Any], numbers: Collection[int]) -> list[Any]:
    """Return the cases of `pytest.mark.parametrize`, of which those with these numbers run each time.

    The others are marked slow: they tell no kind of fault apart from those, and `./tests/run.sh --all` has them.
    """
    assert set(numbers) <= set(range(len(cases)))
    return [case if number in numbers else _slow(case) for number, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
