# SPDX-License-Identifier: Apache-2.0
"""Reducers and sparsification: the specified golden values, and what must hold for any input."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.local_sgd import GTAConfig, LocalSGDConfig
from megatron_ext.outer.penalty import Penalty
from megatron_ext.outer.reducers.gta import Gta, sparsify
from megatron_ext.outer.reducers.linear import Linear
from megatron_ext.outer.reducers.reducer import TermOf

EQUAL, GROWING = [1.0] * 4, [1.0, 2.0, 3.0, 4.0]


def terms():
    """Four workers, worker r with (r + 1)(-1)^r."""
    return [torch.full((4,), (rank + 1.0) * (-1) ** rank) for rank in range(4)]


def softmax(*values):
    return torch.softmax(torch.tensor(values, dtype=torch.float64), dim=0).tolist()


def by_norms_and_steps():
    """Return the weights of workers with norms 1 to 4 that have made 1 to 4 steps, half by either."""
    config = LocalSGDConfig(use_local_sgd=True, local_sgd_workers=4, pseudo_gradnorm_reduce=True, use_step_weight=True)
    norms = torch.arange(1.0, 5.0, dtype=torch.float64).unsqueeze(1)
    (verdict,) = Penalty(config, workers=4, units=1).decide(norms, [1, 2, 3, 4])
    return verdict.weights


@pytest.mark.parametrize(
    ("reducer", "weights", "expected"),
    [
        (Gta(consensus_method="sum"), EQUAL, -3.0),
        (Gta(consensus_method="sum"), softmax(1, 1, 1, 1), -3.0),
        (Gta(consensus_method="sum", int8_mask=True), EQUAL, -3.0),
        (Gta(consensus_method="count"), EQUAL, 2.0),
        (Gta(consensus_method="sum"), GROWING, -10 / 3),
        (Gta(consensus_method="count"), GROWING, 2.5),
        (Gta(consensus_method=None), GROWING, -1.0),
        (Gta(consensus_method=None, normalize=False), EQUAL, -2.0),
        (Gta(consensus_method="sum", normalize=False), EQUAL, -6.0),
        (Linear(), EQUAL, -0.5),
        (Linear(normalize=False), EQUAL, -2.0),
        (Linear(), GROWING, -1.0),
        (Linear(), softmax(-1, -2, -3, -4), 0.30335),
        (Linear(), softmax(-0.5, -1, -1.5, -2), -0.00088),
        (Linear(), by_norms_and_steps(), -0.34833),
    ],
)
def test_reducers_give_the_specified_golden_values(reducer, weights, expected):
    assert reducer(terms(), weights).tolist() == pytest.approx([expected] * 4, abs=6e-6)


def test_exact_zeros_are_on_nobody_s_side():
    result = Gta(consensus_method="sum")([torch.zeros(3), torch.tensor([1.0, -2.0, 0.0])], [1.0, 1.0])
    assert result.tolist() == [1.0, -2.0, 0.0]


@given(st.integers(1, 5), st.integers(0, 2**31))
def test_equal_pseudo_gradients_come_out_as_they_went_in(workers, seed):
    term = torch.randn(50, generator=torch.Generator().manual_seed(seed))
    weights = [1.0 / workers] * workers
    for reducer in (Linear(), Gta(consensus_method="sum"), Gta(consensus_method="count", int8_mask=True)):
        assert torch.allclose(reducer([term.clone() for _ in range(workers)], weights), term)


def test_sparsification_gives_the_specified_golden_values():
    assert sparsify(torch.tensor([1.0, -5, 3, 0.5]), 0.5, "magnitude").tolist() == [0, -5, 3, 0]
    torch.manual_seed(0)
    assert sparsify(torch.arange(1.0, 9), 0.5, "random").tolist() == [1, 0, 3, 4, 5, 0, 7, 0]
    torch.manual_seed(0)
    assert sparsify(torch.arange(1.0, 9), 0.5, "rescaled_random").tolist() == [2, 0, 6, 8, 10, 0, 14, 0]


@given(st.integers(1, 200), st.floats(0.01, 1))
def test_magnitude_keeps_the_largest_and_at_least_one(numel, density):
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    kept = sparsify(tensor, density, "magnitude")
    count = numel if density == 1 else max(int(density * numel), 1)
    assert int((kept != 0).sum()) == count
    assert kept.abs().sum() == pytest.approx(float(tensor.abs().sort(descending=True).values[:count].sum()), rel=1e-4)


def test_random_masks_depend_on_round_worker_and_place_and_on_nothing_else():
    config = GTAConfig(reducer="gta", sparsification_method="random", density=0.5)
    thin, again = config.build().sparsifier, config.build().sparsifier
    tensor = torch.ones(64)
    first = TermOf(round=1, tensor="w", first=0, worker=0)
    changes = ({}, {"worker": 1}, {"round": 2}, {"tensor": "v"}, {"first": 64})
    masks = [thin(tensor, replace(first, **change)).tolist() for change in changes]
    torch.manual_seed(math.prod(range(1, 9)))
    assert again(tensor, replace(first)).tolist() == masks[0]
    assert len({tuple(mask) for mask in masks}) == len(changes)


def test_of_equal_elements_the_first_are_kept_so_that_replicas_lose_the_same_ones():
    tensor = torch.tensor([1.0, -2.0, 2.0, 3.0, -2.0, 2.0])
    assert sparsify(tensor, 0.5, "magnitude").tolist() == [0.0, -2.0, 2.0, 3.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("method", "consensus", "size"),
    [("rescaled_random", None, 1.0), ("random", "sum", 1.0), ("random", "count", 1.0), ("rescaled_random", "sum", 4.0)],
)
def test_what_is_left_of_equal_pseudo_gradients_has_this_size(method, consensus, size):
    """In the mean over the elements that anybody has; the last of these is refused (test_config)."""
    generator = torch.Generator().manual_seed(0)
    terms = [sparsify(torch.ones(20_000), 0.25, method, generator) for _ in range(4)]
    whole = Gta(consensus_method=consensus)(terms, [0.25] * 4)
    kept = whole if consensus is None else whole[whole != 0]
    assert float(kept.mean()) == pytest.approx(size, rel=0.02)
