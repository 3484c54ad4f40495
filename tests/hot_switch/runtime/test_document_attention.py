# SPDX-License-Identifier: Apache-2.0
"""Attention in packed rows is that of each document alone, whatever else its row holds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.hot_switch.data.row_parts import own_positions, row_parts
from megatron_ext.hot_switch.data.rows import Excerpt, document_lengths, document_mask, pack_rows
from megatron_ext.hot_switch.runtime import document_attention
from megatron_ext.hot_switch.runtime.document_attention import attend_within_documents

HEADS, GROUPS, CHANNELS = 4, 2, 3
SCALE = 1 / math.sqrt(CHANNELS)


def packed(rows, padding):
    """A batch of rows with documents of these lengths."""
    length = max(1, *(sum(sizes) for sizes in rows)) + padding
    return pack_rows([[Excerpt(np.arange(size + 1)) for size in sizes] for sizes in rows], length)


def tensors(batch, seed=0):
    """Query, key and value for it, fp64."""
    torch.manual_seed(seed)
    rows, positions = batch.tokens.shape
    shape = {"dtype": torch.float64, "requires_grad": True}
    return [torch.randn(positions, rows, heads, CHANNELS, **shape) for heads in (HEADS, GROUPS, GROUPS)]


def attend_by_hand(query, key, value, forbidden):
    """Softmax attention with a mask, as (positions, rows, heads * channels)."""
    key, value = (tensor.repeat_interleave(HEADS // GROUPS, dim=2) for tensor in (key, value))
    scores = SCALE * torch.einsum("qrhc,krhc->rhqk", query, key)
    weights = scores.masked_fill(forbidden, -math.inf).softmax(-1)
    return torch.einsum("rhqk,krhc->qrhc", weights, value).flatten(2)


ROWS = st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=3)


@given(rows=ROWS, padding=st.integers(0, 3))
def test_lengths_are_those_of_the_documents_in_order(rows, padding):
    lengths = document_lengths(packed(rows, padding).segments)
    assert lengths.dtype == torch.int64
    assert [[length for length in row if length] for row in lengths.tolist()] == rows
    assert lengths.shape[1] == max(map(len, rows))


@given(rows=ROWS, padding=st.integers(0, 3))
def test_values_and_gradients_are_those_of_attention_with_a_mask(rows, padding):
    batch = packed(rows, padding)
    mine, theirs = tensors(batch), tensors(batch)
    counts = (batch.segments >= 0).T[..., None]
    ours = attend_within_documents(*mine, document_lengths(batch.segments), scale=SCALE)
    by_hand = attend_by_hand(*theirs, document_mask(batch.segments))
    assert ours.shape == (*batch.tokens.T.shape, HEADS * CHANNELS)
    torch.testing.assert_close(ours * counts, by_hand * counts, rtol=0, atol=1e-12)
    torch.manual_seed(1)
    weights = torch.randn_like(ours) * counts
    (ours * weights).sum().backward()
    (by_hand * weights).sum().backward()
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=1e-12)


@given(rows=ROWS, padding=st.integers(0, 3), ranks=st.integers(1, 3), window=st.integers(0, 6), block=st.integers(1, 3))
def test_a_position_attends_to_a_window_of_its_document(rows, padding, ranks, window, block):
    longest = max(1, *(sum(sizes) for sizes in rows))
    batch = packed(rows, padding + -(longest + padding) % (2 * ranks))
    mine, theirs = tensors(batch), tensors(batch)
    places = torch.arange(batch.tokens.shape[1])
    far = places[:, None] - places > window
    by_hand = attend_by_hand(*theirs, document_mask(batch.segments) | far)
    torch.manual_seed(1)
    weights = torch.randn_like(by_hand) * (batch.segments >= 0).T[..., None]
    (by_hand * weights).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_attention, "_SMALLEST_BLOCK", block)
        for group in (Ranks(ranks, rank) for rank in range(ranks)):
            own = [own_positions(each.transpose(0, 1), group).transpose(0, 1) for each in (mine[0], by_hand, weights)]
            parts = row_parts(own[0].shape[0], group)
            lengths = document_lengths(batch.segments)
            found = attend_within_documents(own[0], *mine[1:], lengths, scale=SCALE, parts=parts, window=window)
            torch.testing.assert_close(found * (own[2] != 0), own[1] * (own[2] != 0), rtol=0, atol=1e-12)
            (found * own[2]).sum().backward()
    for tensor, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad, rtol=0, atol=1e-12)


class Ranks:
    """Stands for a process group of ranks that share rows."""

    def __init__(self, size, rank):
        self.size, self.rank = lambda: size, lambda: rank


@given(rows=ROWS, padding=st.integers(0, 3), ranks=st.integers(1, 3))
def test_ranks_with_parts_of_rows_have_the_values_and_gradients_of_whole_rows(rows, padding, ranks):
    longest = max(1, *(sum(sizes) for sizes in rows))
    batch = packed(rows, padding + -(longest + padding) % (2 * ranks))
    lengths = document_lengths(batch.segments)
    apart, whole = tensors(batch), tensors(batch)
    together = attend_within_documents(*whole, lengths, scale=SCALE)
    torch.manual_seed(1)
    weights = torch.randn_like(together) * (batch.segments >= 0).T[..., None]
    (together * weights).sum().backward()
    covered = []
    for group in (Ranks(ranks, rank) for rank in range(ranks)):
        own = [own_positions(tensor.transpose(0, 1), group).transpose(0, 1) for tensor in (apart[0], together, weights)]
        parts = row_parts(own[0].shape[0], group)
        found = attend_within_documents(own[0], *apart[1:], lengths, scale=SCALE, parts=parts)
        torch.testing.assert_close(found * (own[2] != 0), own[1] * (own[2] != 0), rtol=0, atol=1e-12)
        # Every rank's share of each gradient exists, also if it is zero: others wait for it.
        gradients = torch.autograd.grad((found * own[2]).sum(), apart)
        for tensor, gradient in zip(apart, gradients, strict=True):
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
        covered += [place for first, last in parts for place in range(first, last)]
    assert sorted(covered) == list(range(batch.tokens.shape[1]))
    for own, other in zip(apart, whole, strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=1e-12)


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), place=st.integers(0, 3))
def test_a_document_in_a_row_has_the_bits_that_it_has_alone(sizes, place):
    place %= len(sizes)
    batch = packed([sizes], 2)
    first = sum(sizes[:place])
    last = first + sizes[place]
    query, key, value = tensors(batch)
    together = attend_within_documents(query, key, value, document_lengths(batch.segments), scale=SCALE)
    alone = [tensor[first:last] for tensor in (query, key, value)]
    lengths = torch.tensor([[sizes[place]]])
    assert torch.equal(together[first:last], attend_within_documents(*alone, lengths, scale=SCALE))


def test_rows_without_documents_leave_no_parameter_without_a_gradient():
    batch = packed([[], []], 2)
    mine = tensors(batch)
    found = attend_within_documents(*mine, document_lengths(batch.segments), scale=SCALE)
    assert torch.isfinite(found).all()
    (found * 0.0).sum().backward()
    assert all(tensor.grad is not None and not tensor.grad.any() for tensor in mine)


def test_weights_are_dropped_at_the_given_rate():
    lengths = torch.tensor([[64]])
    torch.manual_seed(0)
    query, key = torch.zeros(64, 1, 1, 1), torch.zeros(64, 1, 1, 1)
    value = torch.ones(64, 1, 1, 1)
    kept = attend_within_documents(query, key, value, lengths, scale=1.0, dropout=0.25)
    assert len(set(kept.flatten().tolist())) > 1
    assert kept[32:].mean().item() == pytest.approx(1.0, abs=0.1)
