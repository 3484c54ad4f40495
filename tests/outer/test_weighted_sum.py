# SPDX-License-Identifier: Apache-2.0
"""The one sum of pseudo-gradients: its order, its memory, and weights that mean the same whatever they add up to."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.outer.weighted_sum import relative, weighted_mean, weighted_sum


def terms(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(100, generator=generator) for _ in range(count)]


def test_terms_are_added_in_their_order_in_the_memory_of_the_first():
    given_terms = terms(3)
    wanted = given_terms[0] * 0.5 + given_terms[1] * 2 + given_terms[2]
    total = weighted_sum(given_terms, [0.5, 2.0, 1.0])
    assert total is given_terms[0] and torch.equal(total, wanted)


def test_all_terms_but_the_first_may_be_in_the_same_memory():
    whole, memory = terms(4), torch.empty(100)
    streamed = (term.clone() if place == 0 else memory.copy_(term) for place, term in enumerate(whole))
    weights = [1.0, 2.0, 3.0, 4.0]
    assert torch.equal(weighted_mean(streamed, weights), weighted_mean([term.clone() for term in whole], weights))


@given(st.integers(1, 6), st.floats(1e-300, 1e300))
def test_equal_weights_give_the_plain_mean_to_the_last_bit_whatever_they_are(count: int, weight: float):
    plain = terms(count)
    total = plain[0].clone()
    for term in plain[1:]:
        total += term
    assert torch.equal(weighted_mean(plain, [weight] * count), total / count)


def test_one_term_comes_out_as_it_went_in_and_nobody_s_weight_gives_zeros():
    (term,) = terms(1)
    assert torch.equal(weighted_mean([term.clone()], [0.3]), term)
    assert weighted_mean(terms(2), [0.0, 0.0]).tolist() == [0.0] * 100
    assert relative([0.0, 0.0]) == [0.0, 0.0] and relative([1.0, 4.0]) == [0.25, 1.0]


def test_a_weight_too_few_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        weighted_sum(terms(3), [1.0, 1.0])
