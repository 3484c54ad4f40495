# SPDX-License-Identifier: Apache-2.0
"""Codecs: as few bytes as they say, the same values everywhere, small errors, and no non-finite value is hidden."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.outer.codecs.all_codecs import build_codec, lossy_codecs

# Largest error relative to the largest value of a block.
WORST = {"bf16": 2**-8, "fp16": 2**-11, "fp8": 2**-4, "int8": 0.5 / 127 + 2**-8, "int4": 0.5 / 7 + 2**-8}
SIZES = [0, 1, 2, 127, 128, 129, 4095, 4096, 4097, 10_000]


def around(name, values):
    """Return values after one way through a codec, and the number of bytes."""
    codec = build_codec(name)
    data = codec.encode(values)
    assert data.dtype == torch.uint8 and data.shape == (codec.nbytes(values.numel()),)
    decoded = codec.decode(data, values.numel())
    assert decoded.dtype == torch.float32 and decoded.shape == values.shape
    return decoded, data.numel()


@pytest.mark.parametrize("name", WORST)
@pytest.mark.parametrize("size", SIZES)
def test_the_error_is_as_small_as_the_numbers_allow(name, size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    decoded, _ = around(name, values)
    limit = values.abs().max() * WORST[name] if size else 0
    assert torch.all((decoded - values).abs() <= limit)


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        *(("bf16", 0.5), ("fp16", 0.5), ("fp8", 0.254), ("int8", 0.254), ("int4", 0.129)),
        *(("topk", 1 / 32), ("topk2", 0.01392)),
    ],
)
def test_the_bytes_are_as_few_as_promised(name, ratio):
    numel = 1 << 20
    _, nbytes = around(name, torch.ones(numel))
    assert nbytes / (4 * numel) <= ratio


@pytest.mark.parametrize("name", lossy_codecs())
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e4])
def test_small_and_large_values_survive(name, scale):
    values = scale * torch.linspace(-1, 1, 1000)
    decoded, _ = around(name, values)
    if scale == 1e-30 and name == "fp16":
        assert not decoded.any()  # below its range; error feedback keeps it
    else:
        assert decoded[0] == pytest.approx(-scale, rel=0.02)


@pytest.mark.parametrize("name", lossy_codecs())
def test_zeros_stay_zeros(name):
    decoded, _ = around(name, torch.zeros(300))
    assert not decoded.any()


@pytest.mark.parametrize("name", lossy_codecs())
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_what_is_non_finite_stays_so(name, special):
    values = torch.ones(5000)
    values[4321] = special
    decoded, _ = around(name, values)
    assert not torch.isfinite(decoded).all()


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("too_large", [[], [0], [299], [1, 150]])
def test_what_is_too_large_becomes_the_largest_and_the_rest_is_rounded(name, dtype, too_large):
    largest = torch.finfo(dtype).max
    values = torch.linspace(-3, 3, 300)
    expected = values.to(dtype).float()
    for place in too_large:
        values[place] = math.copysign(min(largest * 1.5, torch.finfo(torch.float32).max), values[place])
        expected[place] = math.copysign(largest, values[place])
    decoded, _ = around(name, values)
    assert torch.equal(decoded, expected)


@pytest.mark.parametrize("name", lossy_codecs())
def test_decoding_needs_no_alignment(name):
    codec = build_codec(name)
    values = torch.randn(777)
    data = codec.encode(values)
    within = torch.cat([torch.zeros(1, dtype=torch.uint8), data])[1:]
    assert torch.equal(codec.decode(within, 777), codec.decode(data, 777))


@given(size=st.integers(1, 9000), density=st.sampled_from([1e-4, 1 / 32, 0.5, 1.0]), seed=st.integers(0, 99))
def test_topk_keeps_the_largest_of_every_chunk(size, density, seed):
    codec = build_codec("topk", density)
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    decoded = codec.decode(codec.encode(values), size)
    for start in range(0, size, 4096):
        own, kept = values[start : start + 4096], decoded[start : start + 4096]
        count = max(1, round(density * own.numel()))
        assert int((kept != 0).sum()) == count
        threshold = own.abs().topk(count).values[-1]
        assert torch.all(own[kept != 0].abs() >= threshold)
        assert torch.equal(kept[kept != 0], own[kept != 0].bfloat16().float())


@pytest.mark.parametrize("name", lossy_codecs())
def test_error_feedback_delivers_everything_in_the_end(name):
    generator = torch.Generator().manual_seed(0)
    codec = build_codec(name)
    wanted, delivered, residual = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000)
    for _ in range(200):
        value = torch.randn(1000, generator=generator) + 1
        wanted += value
        sent = codec.decode(codec.encode(value + residual), 1000)
        residual += value - sent
        delivered += sent
    assert torch.allclose(delivered + residual, wanted, atol=1e-2)
    assert (delivered - wanted).norm() < 0.4 * wanted.norm()


def test_of_equal_values_topk_keeps_the_first():
    values = torch.full((5000,), -0.5)
    codec = build_codec("topk", 0.01)
    kept = codec.decode(codec.encode(values), 5000).nonzero().view(-1).tolist()
    assert kept == [*range(41), *range(4096, 4105)]


def test_topk_keeps_finite_values_finite():
    largest = torch.full((8,), torch.finfo(torch.float32).max)
    codec = build_codec("topk", 1.0)
    assert codec.decode(codec.encode(largest), 8).isfinite().all()
