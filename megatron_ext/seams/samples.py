# SPDX-License-Identifier: Apache-2.0
"""Seam: the training samples, cut into parts for jobs that train together without knowing each other.

Sample k of part i of n is sample k * n + i of the whole, whatever a job's layout and batch size are. So parts have
nothing in common, and how many samples of its part a job has consumed, which Megatron counts and saves, says where it
continues.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.hooks import CutsSamples, RepeatsSteps, hooks
from megatron_ext.patching import Patch
from megatron_ext.run_options import run_options

__all__ = ["PartOfSamples", "RepeatedSamples", "patches"]


_WITHOUT_END = 2**62
"""Samples; Megatron's sampler counts up to it."""


def patches() -> list[Patch]:
    """Return the patches of this seam."""
    return [
        Patch(
            name="data/samples",
            target="megatron.training.training:get_train_valid_test_num_samples",
            wrap=_wrap_counts,
            serves=(RepeatsSteps.data_slack,),
            reason="the training samples have to be enough for all jobs that share them",
        ),
        Patch(
            name="data/loader",
            target="megatron.training.datasets.data_samplers:build_pretraining_data_loader",
            wrap=_wrap_loader,
            serves=(CutsSamples.data_part, RepeatsSteps.data_place),
            parameters=("dataset", "consumed_samples"),
            reason="give every job its own part of the training samples, and every worker its own place in them",
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


class RepeatedSamples(torch.utils.data.Dataset[Any]):
    """The samples of a dataset over and over again, as many whole global batches as there are.

    Workers at their own pace read other batches at one time, each its slice of every batch, so that nobody reads what
    is another's, also where one is through and begins again.
    """

    def __init__(self, dataset: Any, batch: int) -> None:
        """Take the samples.

        Args:
            dataset: one pass.
            batch: samples of a global batch.

        Raises:
            UserError: there are fewer than that.
        """
        self.whole = dataset
        self.usable = len(dataset) // batch * batch
        self.split = _split_of(dataset)
        if not self.usable:
            raise UserError(
                f"the {len(dataset)} training samples are fewer than --global-batch-size {batch}, of which every "
                "worker reads a slice; give more data"
            )

    def __len__(self) -> int:
        return _WITHOUT_END

    def __getitem__(self, number: int) -> Any:
        return self.whole[int(number) % self.usable]


def _wrap_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_train_valid_test_num_samples(*args: Any, **kwargs: Any) -> Any:
        train, valid, test = original(*args, **kwargs)
        run = run_options()
        return math.ceil(train * hooks.data_part(run)[1] * (hooks.data_slack(run) or 1)), valid, test

    return get_train_valid_test_num_samples


def _wrap_loader(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def build_pretraining_data_loader(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.datasets.utils import Split
        run = run_options()
        bound = signature.bind(*args, **kwargs)
        dataset = bound.arguments["dataset"]
        index, count = hooks.data_part(run)
        apart = hooks.data_slack(run) is not None
        if dataset is not None and (count > 1 or apart):
            split = _split_of(dataset)
            if split is None:
                raise UserError(
                    f"the {type(dataset).__name__} of this script does not say whether it is for training or for "
                    "validation, so it cannot be cut into parts; give it an attribute `split` or `index_split`"
                )
            if split is Split.train and count > 1:
                bound.arguments["dataset"] = PartOfSamples(dataset, index, count)
            if split is Split.train and apart:
                _walk_apart(bound.arguments, run)
        return original(*bound.args, **bound.kwargs)

    return build_pretraining_data_loader


def _walk_apart(given: dict[str, Any], args: Any) -> None:
    """Let the samples that a loader is built on begin at this worker's own place."""
    if args.dataloader_type == "single":  # the other one begins again by itself
        given["dataset"] = RepeatedSamples(given["dataset"], args.global_batch_size)
        samples = given["dataset"].usable
    else:
        samples = len(given["dataset"])
    given["consumed_samples"] = hooks.data_place(args, samples)


def _split_of(dataset: Any) -> Any:
    return getattr(dataset, "split", getattr(dataset, "index_split", None))
