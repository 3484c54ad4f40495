# SPDX-License-Identifier: Apache-2.0
"""What a user's `get_batch` reads in the turn of a strategy: these tensors, once for each micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_ext.errors import UserError
from megatron_ext.hot_switch.data.rows import PackedBatch

__all__ = ["MicroBatches"]

_KEYS = ("tokens", "labels", "loss_mask", "position_ids")

_LONGEST = "max_seqlen"
"""With --sft Megatron sends it to the other tensor-parallel ranks, which wait for it, though nobody looks at it without
`cu_seqlens`, which are missing."""


class _NoTensor(UserError, KeyError):
    """What a dictionary raises, for a get_batch that asks for more than it needs, and one sentence for any other."""

    __str__ = Exception.__str__


class MicroBatches(Iterator[dict[str, torch.Tensor]]):
    """Yields micro-batches in the form in which Megatron's GPT dataset gives them, without an attention mask."""

    def __init__(self, batches: Sequence[PackedBatch]) -> None:
        """Take the micro-batches of a turn, in order."""
        self._batches = batches
        self._taken = 0
        self._asked_in_vain = 0

    def __next__(self) -> dict[str, torch.Tensor]:
        if self._taken == len(self._batches):
            self._asked_in_vain += 1
            raise StopIteration
        batch = self._batches[self._taken]
        self._taken += 1
        rows, positions = batch.tokens.shape
        longest = torch.full((rows,), positions, dtype=torch.int32)
        return _Tensors({name: getattr(batch, name) for name in _KEYS} | {_LONGEST: longest})

    def require_no_more(self, most: int = 0) -> None:
        """Check how often more were asked for than there are.

        Raises:
            UserError: more often than that.
        """
        if self._asked_in_vain > most:
            raise UserError(
                f"hot switching: the forward step takes more than the {self._taken} micro-batches of a turn from its "
                "iterator; let get_batch take one for each"
            )

    def require_end(self) -> None:
        """Check that all were taken, and no more but by a get_batch that reads one ahead.

        Raises:
            UserError: what was trained is not what documents, tokens and samples are counted of.
        """
        self.require_no_more(1)
        if self._taken < len(self._batches):
            raise UserError(
                f"hot switching: the forward step took {self._taken} of the {len(self._batches)} micro-batches of a "
                "turn from its iterator; let get_batch take one for each: where documents begin and end is known of "
                "these alone"
            )


class _Tensors(dict[str, torch.Tensor]):
    def __missing__(self, name: str) -> torch.Tensor:
        raise _NoTensor(
            f"hot switching: get_batch reads {name!r}, but micro-batches have {', '.join(_KEYS)}; let it read these"
        )
