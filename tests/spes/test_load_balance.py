# SPDX-License-Identifier: Apache-2.0
"""The decayed load-balancing loss: golden values, and a factor that depends on the step alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.spes import count_weights, decayed_factor, load_balancing_loss


def test_golden_values_of_the_loss():
    generator = torch.Generator().manual_seed(0)
    probabilities = [torch.softmax(torch.randn(6, 4, generator=generator), dim=1) for _ in range(2)]
    counts = [torch.bincount(found.topk(2, dim=1).indices.view(-1), minlength=4) for found in probabilities]
    for factor, wanted in ((1.0, 0.0113461604), (0.85, 0.0106127448)):
        weights = count_weights(4, (0, 1), factor)
        found = load_balancing_loss(counts, probabilities, topk=2, weight=0.01, count_weights=weights)
        assert float(found) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("step", "total", "wanted"),
    [(0, 1000, 0.7), (100, 1000, 0.85), (199, 1000, 0.9985), (200, 1000, 1), (500, 50000, 0.715), (10000, 50000, 1)],
)
def test_golden_values_of_the_factor(step: int, total: int, wanted: float):
    assert decayed_factor(step, total) == pytest.approx(wanted, abs=1e-12)


@given(st.integers(0, 3000), st.integers(1, 10_000), st.integers(1, 700))
def test_the_factor_changes_at_multiples_of_its_interval_only_and_never_falls(step: int, total: int, every: int):
    factor = decayed_factor(step, total, every)
    assert factor == decayed_factor(step // every * every, total)
    assert 0.7 <= factor <= decayed_factor(step + 1, total, every) <= 1


def test_the_first_steps_are_trained_with_the_factor_as_well():
    assert decayed_factor(1, 50_000, 500) == decayed_factor(499, 50_000, 500) == 0.7


def test_only_what_a_peer_owns_is_weighted():
    assert count_weights(5, {1, 3}, 0.5).tolist() == [1, 0.5, 1, 0.5, 1]
