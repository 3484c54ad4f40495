# SPDX-License-Identifier: Apache-2.0
"""Another package's reducer is tried before a run begins: what would differ between ranks or places is refused."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar

import pytest
import torch

from megatron_ext.outer.places import Where
from megatron_ext.outer.reducer_config import GTAConfig
from megatron_ext.outer.reducers.all_reducers import REDUCERS
from megatron_ext.outer.reducers.linear import Linear
from megatron_ext.outer.reducers.reducer import OPTIONS, Reducer
from megatron_ext.outer.reducers.reducer_checks import reducer_problems
from megatron_ext.outer.weighted_sum import weighted_mean


class Mean(Reducer):
    """The mean, in a way that takes all terms at once."""

    name = "mean"

    def __call__(self, terms: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        return self.of(torch.stack(list(terms)), torch.tensor(weights))

    def of(self, stack: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (stack * weights[:, None]).sum(dim=0) / weights.sum().clamp(min=1e-8)


class Wide(Mean):
    name = "wide"

    def of(self, stack, weights):
        return super().of(stack, weights).double()


class Divides(Mean):
    name = "divides"

    def of(self, stack, weights):
        return (stack * weights[:, None]).sum(dim=0) / weights.sum()


class Shaken(Mean):
    name = "shaken"

    def of(self, stack, weights):
        return super().of(stack, weights) + torch.rand(stack.shape[1])


class ByNorm(Mean):
    """Divides by the norm of what it is given, which is not that of a tensor."""

    name = "by-norm"

    def of(self, stack, weights):
        return super().of(stack, weights) / stack.norm()


class KeepsTerms(Mean):
    name = "keeps-terms"
    streams = True


class NearlyMean(Mean):
    name = "nearly-mean"
    is_mean = True

    def of(self, stack, weights):
        return (stack.double() * weights[:, None]).sum(dim=0).div(weights.sum().clamp(min=1e-8)).float()


class Unfinished(Reducer):
    name = "unfinished"


class Optional(Mean):
    name = "optional"
    options = ("normalize", "trim")


class Paired(Mean):
    name = "paired"
    in_pairs = True


class Alone(Mean):
    name = "alone"
    refused_in: ClassVar = {}

    def of(self, stack, weights):
        return super().of(stack, weights).sign()


class Elsewhere(Mean):
    name = "elsewhere"
    refused_in: ClassVar = {Where.SERVER: ""}


class MeanAgain(Linear):
    """The mean, and it says so."""

    name = "mean-again"
    is_mean = True

    def __call__(self, terms: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        return weighted_mean(terms, weights)


@pytest.mark.parametrize("name", REDUCERS.own_names)
def test_our_own_pass(name):
    assert reducer_problems(name, REDUCERS.find(name)) == []


@pytest.mark.parametrize("kind", [Mean, MeanAgain])
def test_so_does_a_mean(kind):
    assert reducer_problems(kind.name, kind) == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (dict, "it is not a class derived from megatron_ext.outer.reducers.reducer.Reducer"),
        (Unfinished, "it lacks __call__"),
        (Wide, "it makes torch.float64 of shape (40,) of fp32 terms of shape (40,)"),
        (Divides, "it makes a non-finite value of finite ones with the weights [0.0, 0.0, 0.0]"),
        (Shaken, "it makes other values of the same terms the second time"),
        (ByNorm, "it makes other values of two parts of a tensor than of both at once; every element must be"),
        (KeepsTerms, "it says that it streams, but looks at a term again after it has asked for the next one"),
        (NearlyMean, "it says that it is the weighted mean, but makes other bits than megatron_ext's"),
        (Optional, "its options have 'trim'; the options are consensus_method, sparsification_method, normalize"),
        (Paired, "it claims to work in synchronous rounds at a server, which keeps one anchor, and is in_pairs"),
        (Alone, "it claims to work in asynchronous rounds at a server, where each contribution comes alone"),
        (Elsewhere, "refused_in has <Where.SERVER: 'synchronous rounds at a server'>: ''; give a megatron_ext.outer."),
    ],
)
def test_one_that_would_make_other_values_somewhere_is_refused(kind, said):
    (problem,) = reducer_problems(getattr(kind, "name", "dict"), kind)
    assert said in problem


def test_its_name_is_that_of_its_entry_point():
    assert reducer_problems("other", Mean) == ["its name is 'mean'; give it that of the entry point"]


def test_a_reducer_may_be_made_with_every_field_of_its_configuration():
    fields = [entry.name for entry in dataclasses.fields(GTAConfig)]
    assert sorted(OPTIONS) == sorted(set(fields) - {"reducer"})
