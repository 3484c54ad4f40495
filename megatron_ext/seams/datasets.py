# SPDX-License-Identifier: Apache-2.0
"""Seam: Megatron's datasets. What hangs there is refused instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.patching import Patch

__all__ = ["patches"]


def patches() -> list[Patch]:
    """Return the patches of this seam; they are applied whatever the arguments ask for."""
    return [
        Patch(
            name="arguments/empty-split",
            target="megatron.core.datasets.gpt_dataset:GPTDataset._get_num_epochs",
            wrap=_wrap_epochs,
            parameters=("self", "num_tokens_per_epoch"),
            reason="refuse a part of --split without documents, in which Megatron would look for samples forever",
        )
    ]


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
