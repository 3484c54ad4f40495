# SPDX-License-Identifier: Apache-2.0
"""Seam: the training samples, cut into parts for jobs that train together without knowing each other.

Sample k of part i of n is sample k * n + i of the whole, whatever a job's layout and batch size are. So parts have
nothing in common, and how many samples of its part a job has consumed, which Megatron counts and saves, says where it
continues.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.hooks import CutsSamples, hooks
from megatron_ext.patching import Patch

__all__ = ["PartOfSamples", "patches"]


def patches() -> list[Patch]:
    """Return the patches of this seam."""
    return [
        Patch(
            name="data/samples",
            target="megatron.training.training:get_train_valid_test_num_samples",
            wrap=_wrap_counts,
            reason="the training samples have to be enough for all jobs that share them",
        ),
        Patch(
            name="data/loader",
            target="megatron.training.datasets.data_samplers:build_pretraining_data_loader",
            wrap=_wrap_loader,
            serves=(CutsSamples.data_part,),
            parameters=("dataset", "consumed_samples"),
            reason="give every job its own part of the training samples",
        ),
    ]


class PartOfSamples(torch.utils.data.Dataset[Any]):
    """Every n-th sample of a dataset."""

    def __init__(self, dataset: Any, index: int, count: int) -> None:
        """Take the samples.

        Args:
            dataset: the whole.
            index: of the part, from 0.
            count: number of parts.
        """
        self.whole = dataset
        self.index = index
        self.count = count
        # By this Megatron tells training from validation.
        self.split = _split_of(dataset)

    def __len__(self) -> int:
        return len(self.whole) // self.count

    def __getitem__(self, number: int) -> Any:
        return self.whole[int(number) * self.count + self.index]


def _wrap_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_train_valid_test_num_samples(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        train, valid, test = original(*args, **kwargs)
        return train * hooks.data_part(get_args())[1], valid, test

    return get_train_valid_test_num_samples


def _wrap_loader(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def build_pretraining_data_loader(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.datasets.utils import Split
        from megatron.training import get_args

        bound = signature.bind(*args, **kwargs)
        dataset = bound.arguments["dataset"]
        index, count = hooks.data_part(get_args())
        if dataset is not None and count > 1:
            split = _split_of(dataset)
            if split is None:
                raise UserError(
                    f"the {type(dataset).__name__} of this script does not say whether it is for training or for "
                    "validation, so it cannot be cut into parts; give it an attribute `split` or `index_split`"
                )
            if split is Split.train:
                bound.arguments["dataset"] = PartOfSamples(dataset, index, count)
        return original(*bound.args, **bound.kwargs)

    return build_pretraining_data_loader


def _split_of(dataset: Any) -> Any:
    return getattr(dataset, "split", getattr(dataset, "index_split", None))
