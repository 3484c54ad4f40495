# SPDX-License-Identifier: Apache-2.0
"""The largest values in 2 bits: at most 2 bytes each, and what is not sent stays with the sender."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.outer.codecs.all_codecs import build_codec

CHUNK = 4096
DENSITIES = st.sampled_from([1 / 256, 1 / 64, 1 / 32, 0.3, 1.0])


def random(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("size", "density", "nbytes"),
    [
        (CHUNK, 1 / 32, 4 + 128 * 14 // 8),
        (CHUNK, 1 / 64, 4 + 64 * 14 // 8),
        (CHUNK, 1 / 256, 2 * 16),
        (3 * CHUNK, 1 / 32, 3 * 228),
        (CHUNK + 100, 1 / 32, 228 + 4 + 16 * 9 // 8),
        (CHUNK, 1.0, 4 + 4096 * 14 // 8),
        (3, 1 / 32, 6),
        (1, 1 / 32, 5),
        (0, 1 / 32, 0),
    ],
)
def test_every_byte_is_accounted_for(size, density, nbytes):
    codec = build_codec("topk2", density)
    assert codec.nbytes(size) == nbytes == codec.encode(random(size)).numel()


@given(size=st.integers(3, 9000), density=DENSITIES, seed=st.integers(0, 99))
def test_a_kept_value_takes_at_most_two_bytes_and_is_among_the_largest_of_its_chunk(size, density, seed):
    codec, values = build_codec("topk2", density), random(size, seed)
    data = codec.encode(values)
    decoded = codec.decode(data, size)
    for start in range(0, size, CHUNK):
        own, kept = values[start : start + CHUNK], decoded[start : start + CHUNK]
        sent = kept != 0
        assert int(sent.sum()) == max(min(16, own.numel()), round(density * own.numel()))
        assert own[sent].abs().min() >= own[~sent].abs().max() if not sent.all() else True
        assert torch.equal(kept[sent].sign(), own[sent].sign())
        # Two magnitudes, each the mean of its own.
        for size_of in kept[sent].abs().unique():
            alike = kept.abs() == size_of
            assert size_of == pytest.approx(float(own[alike].abs().mean()), rel=2**-8)
        assert len(kept[sent].abs().unique()) <= 2
        if own.numel() > 2:
            assert codec.nbytes(own.numel()) <= 2 * int(sent.sum())


@given(size=st.integers(1, 9000), density=DENSITIES, seed=st.integers(0, 99))
def test_what_was_sent_and_what_stays_add_up_to_what_there_was(size, density, seed):
    # Of heavy tails, where a coarse number could lose more than it sends.
    values = random(size, seed) ** 5
    codec = build_codec("topk2", density)
    sent = codec.decode(codec.encode(values), size)
    residual = values - sent
    left_out = sent == 0
    assert torch.equal(residual[left_out], values[left_out])
    assert torch.allclose(sent + residual, values, rtol=1e-6, atol=1e-6 * float(values.abs().max()))
    assert residual.norm() < values.norm()


def test_messages_of_sent_values_bring_all_of_a_constant_gradient_in_the_end():
    codec, gradient = build_codec("topk2", 1 / 64), random(CHUNK) ** 3
    residual, delivered = torch.zeros(CHUNK), torch.zeros(CHUNK)
    for _ in range(400):
        sent = codec.decode(codec.encode(gradient + residual), CHUNK)
        residual += gradient - sent
        delivered += sent
    assert torch.allclose(delivered + residual, 400 * gradient, rtol=1e-3, atol=1e-2)
    assert residual.norm() < 0.2 * (400 * gradient).norm()


def test_chunks_by_themselves_become_the_same_values_as_together():
    codec, values = build_codec("topk2"), random(5 * CHUNK)
    together = codec.decode(codec.encode(values), 5 * CHUNK)
    parts = [codec.decode(codec.encode(part), CHUNK) for part in values.split(CHUNK)]
    assert torch.equal(torch.cat(parts), together)


def test_the_largest_finite_values_stay_finite():
    largest = torch.full((8,), torch.finfo(torch.float32).max)
    codec = build_codec("topk2")
    assert codec.decode(codec.encode(largest), 8).isfinite().all()


def test_results_have_room_for_what_all_messages_chose_and_a_name_that_makes_them_again():
    results = build_codec("topk2").for_results(4)
    assert results.name == "topk2:0.125"
    assert build_codec(results.name).nbytes(CHUNK) == results.nbytes(CHUNK) == 4 + 512 * 14 // 8


@pytest.mark.parametrize("density", [0.0, 1 / 257, 1.5])
def test_a_density_that_two_bytes_are_too_few_for_is_refused_by_name(density):
    said = "at least 0.00390625 with topk2, and at most 1"
    with pytest.raises(UserError, match=f"the density of codec 'topk2:{density!r}' must be {said}$"):
        build_codec(f"topk2:{density!r}")
    config = LocalSGDConfig(use_local_sgd=True, local_sgd_workers=2, codec="topk2", codec_density=density)
    assert f"--local-sgd-codec-density is {density}; it must be {said}" in config.problems()
    fewest = LocalSGDConfig(use_local_sgd=True, local_sgd_workers=2, codec="topk2", codec_density=1 / 256)
    assert not fewest.problems()
