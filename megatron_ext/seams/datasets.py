# SPDX-License-Identifier: Apache-2.0
"""Seam: Megatron's datasets. What hangs there, or ends with a stack of every rank, is refused instead."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_ext.errors import UserError
from megatron_ext.patching import Patch
from megatron_ext.seams.arguments import say

__all__ = ["patches"]

_NOT_COMPILED = "megatron_ext/helpers are not compiled"
"""Key of the process group's store."""


def patches() -> list[Patch]:
    """Return the patches of this seam; they are applied whatever the arguments ask for."""
    return [
        Patch(
            name="arguments/empty-split",
            target="megatron.core.datasets.gpt_dataset:GPTDataset._get_num_epochs",
            wrap=_wrap_epochs,
            parameters=("self", "num_tokens_per_epoch"),
            reason="refuse a part of --split without documents, in which Megatron would look for samples forever",
        ),
        Patch(
            name="wheel/helpers-missing",
            target="megatron.training.initialize:_compile_dependencies",
            wrap=_wrap_dependencies,
            reason="where the helpers of a checkout cannot be compiled the first rank alone ends, and the others wait",
        ),
    ]


def _wrap_dependencies(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_dependencies() -> None:
        store = dist.distributed_c10d._get_default_store()
        try:
            original()
        except (SystemExit, FileNotFoundError):  # compilation failed, or there is no make: on the first rank
            compiled = _compiled_before()
            if compiled is None:
                store.set(_NOT_COMPILED, "yes")
            else:
                say(f"Megatron's index helpers cannot be compiled here; taking {compiled}, which was compiled before")
            dist.barrier()  # in which the others are
        if store.check([_NOT_COMPILED]):
            datasets = importlib.import_module("megatron.core.datasets")
            raise UserError(
                f"Megatron's index helpers in {next(iter(datasets.__path__))} are not compiled, and cannot be (the "
                "first rank says why above): that needs make, g++, python3-config of this Python and pybind11; pip "
                "install pybind11, or install the wheel megatron-core, which has them"
            )

    return compile_dependencies


def _compiled_before() -> Path | None:
    """Return the library of helpers of a checkout for this Python, if it is there and loads."""
    try:
        library = importlib.import_module("megatron.core.datasets.helpers_cpp").__file__
    except ImportError:
        return None
    return Path(library) if library is not None and Path(library).with_name("Makefile").exists() else None


def _wrap_epochs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_num_epochs(self: Any, num_tokens_per_epoch: int) -> Any:
        if num_tokens_per_epoch == 0 and self.num_samples:
            config = self.config
            raise UserError(
                f"--split {config.split}: {self.dataset_path} has no document for its {self.index_split.name} part, "
                f"of which {self.num_samples} samples are asked for; give that part a larger share or 0, or use a "
                "larger corpus"
            )
        return original(self, num_tokens_per_epoch)

    return get_num_epochs
