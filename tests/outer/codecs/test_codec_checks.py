# SPDX-License-Identifier: Apache-2.0
"""Another package's codec is tried before a run begins: what would let workers or peers drift apart is refused."""

from typing import ClassVar

import pytest
import torch

from megatron_ext.outer.codecs.all_codecs import CODECS
from megatron_ext.outer.codecs.cast import Bf16Codec
from megatron_ext.outer.codecs.codec import Codec
from megatron_ext.outer.codecs.codec_checks import codec_problems
from megatron_ext.outer.codecs.scaled import Int8Codec
from megatron_ext.outer.codecs.topk import TopKCodec
from megatron_ext.outer.places import Where


class Half(Bf16Codec):
    """The first half of a codec's bytes."""

    name = "half"

    def encode(self, values):
        return super().encode(values)[: values.numel()]


class Wide(Bf16Codec):
    name = "wide"

    def decode(self, data, numel):
        return super().decode(data, numel).double()


class Spoils(Bf16Codec):
    name = "spoils"

    def encode(self, values):
        return super().encode(values.mul_(2))


class Dithers(Bf16Codec):
    """Rounds at random."""

    name = "dithers"

    def encode(self, values):
        return super().encode(values + 0.01 * torch.rand(values.shape))


class Aligned(Bf16Codec):
    name = "aligned"

    def decode(self, data, numel):
        start = data.storage_offset() // 2 * 2
        return torch.as_strided(data, (2 * numel,), (1,), start).clone().view(torch.bfloat16).float()


class FineGrid(Int8Codec):
    name = "fine-grid"
    grid = 64


class NoGrid(Int8Codec):
    name = "no-grid"
    grid = 1


class Shrinks(Bf16Codec):
    name = "shrinks"

    def decode(self, data, numel):
        return super().decode(data, numel) * 0.7


class Lopsided(Bf16Codec):
    """Rounds negative numbers to fewer bits."""

    name = "lopsided"
    is_cast = False

    def encode(self, values):
        rounded = super().encode(values).view(torch.int16)
        return torch.where(rounded < 0, rounded & ~3, rounded).view(torch.uint8)


class Offset(Int8Codec):
    name = "offset"

    def decode(self, data, numel):
        return super().decode(data, numel) + 0.5


class NoCast(Bf16Codec):
    """Has its bytes the other way round."""

    name = "no-cast"

    def encode(self, values):
        return super().encode(values).view(-1, 2).flip(1).reshape(-1)

    def decode(self, data, numel):
        return super().decode(data.view(-1, 2).flip(1).reshape(-1), numel)


class Narrow(Int8Codec):
    name = "narrow"
    dtype = torch.bfloat16


class Hides(Bf16Codec):
    name = "hides"

    def encode(self, values):
        return super().encode(values.nan_to_num())


class Huge(Int8Codec):
    name = "huge"
    grid = 1 << 21


class Fat(Bf16Codec):
    name = "fat"
    is_cast = False
    dtype = torch.float32

    def nbytes(self, numel):
        return 8 * numel

    def encode(self, values):
        return values.double().view(torch.uint8)

    def decode(self, data, numel):
        return data.clone().view(torch.float64).float()


class Renames(Bf16Codec):
    name = "renames"

    def for_results(self, messages):
        made = type(self)()
        made.name = f"renames-of-{messages}"
        return made


class Unfinished(Codec):
    name = "unfinished"
    grid = 1

    def nbytes(self, numel):
        return numel


class Elsewhere(Bf16Codec):
    name = "elsewhere"
    refused_in: ClassVar = {"cloud": "it is too far away"}


class InJobsAlone(Huge):
    """Too large for a frame, and said so."""

    name = "in-jobs-alone"
    refused_in: ClassVar = {place: "its grid is larger than a frame" for place in (Where.SERVER, Where.ASYNCHRONOUS)}


class Sparse(TopKCodec):
    name = "sparse"


@pytest.mark.parametrize("name", CODECS.own_names)
def test_our_own_pass(name):
    assert codec_problems(name, CODECS.find(name)) == []


@pytest.mark.parametrize("kind", [InJobsAlone, Sparse])
def test_so_does_one_that_says_where_it_does_not_work_or_takes_a_density(kind):
    assert codec_problems(kind.name, kind) == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (dict, "it is not a class derived from megatron_ext.outer.codecs.codec.Codec"),
        (Unfinished, "it lacks dtype, decode, encode"),
        (Half, "encode makes torch.uint8 of shape (1,) of 1 values; it must be uint8 of shape (2,), as nbytes says"),
        (Wide, "decode makes torch.float64 of shape (0,) of 0 values; it must be fp32"),
        (Spoils, "encode changes the values that it is given"),
        (Dithers, "encode makes other bytes of the same values the second time"),
        (Aligned, "decode gives other values where the bytes begin at an odd address; see codec.as_numbers"),
        (FineGrid, "parts of 64 elements, which is its grid, decode to other values by themselves than all at once"),
        (NoGrid, "parts of 1 elements, which is its grid, decode to other values by themselves than all at once"),
        (Shrinks, "what it decodes to, or its opposite, is not coded without loss, which a grid of 1 promises"),
        (Lopsided, "what it decodes to, or its opposite, is not coded without loss, which a grid of 1 promises"),
        (Offset, "zeros do not decode to zeros, which are not sent at all"),
        (NoCast, "it does not cast: its bytes are not those of torch.bfloat16; let is_cast be False"),
        (Narrow, "its dtype, torch.bfloat16, does not hold what it decodes to"),
        (Hides, "nan decodes to a finite value, which hides that a worker has diverged"),
        (Huge, "its grid is 2097152, and a frame holds at most 1048576 elements; repair that, or put synchronous"),
        (Fat, "it makes 8388608 bytes of 1048576 values, more than fp32"),
        (Renames, "for_results gives one named 'renames-of-3', which nobody else could make of the name"),
        (Elsewhere, "refused_in has 'cloud': 'it is too far away'; give a megatron_ext.outer.places.Where"),
    ],
)
def test_one_that_would_let_peers_drift_apart_is_refused(kind, said):
    (problem,) = codec_problems(getattr(kind, "name", "dict"), kind)
    assert said in problem


def test_its_name_is_that_of_its_entry_point():
    assert codec_problems("other", Bf16Codec) == ["its name is 'bf16'; give it that of the entry point"]
