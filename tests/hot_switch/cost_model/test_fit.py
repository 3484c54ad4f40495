# SPDX-License-Identifier: Apache-2.0
"""Coefficients of the time of a row, from measured times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.hot_switch.cost_model.fit import fit_coefficients
from megatron_ext.hot_switch.cost_model.step_time import Coefficients

LENGTHS = [512, 1024, 2048, 4096]


@given(
    squared=st.floats(0, 1e-8),
    linear=st.floats(1e-6, 1e-4),
    constant=st.floats(1e-3, 1e-1),
)
def test_exact_times_give_their_coefficients_back(squared: float, linear: float, constant: float) -> None:
    true = Coefficients(squared=squared, linear=linear, constant=constant)
    found = fit_coefficients(LENGTHS, [true.seconds(length**2, length) for length in LENGTHS])
    for length in (*LENGTHS, 300, 8192):
        assert found.seconds(length**2, length) == pytest.approx(true.seconds(length**2, length), rel=1e-5)


@given(st.lists(st.floats(1e-4, 10.0), min_size=4, max_size=4))
def test_no_times_give_a_negative_coefficient(seconds: list[float]) -> None:
    found = fit_coefficients(LENGTHS, seconds)
    assert min(found.squared, found.linear, found.constant) >= 0
    assert found.seconds(1.0, 1.0) > 0


def test_two_lengths_do_not_say_enough() -> None:
    with pytest.raises(UserError, match="three different lengths, and there are 2"):
        fit_coefficients([1, 2, 2], [1.0, 2.0, 2.0])
