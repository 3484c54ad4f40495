# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction in packed rows: its layers look ahead within a document, and every document counts by itself.

A layer takes the token that follows, the next layer the one after that. Megatron shifts whole rows by one position for
it, and takes the mean of a layer's loss over what a micro-batch has left, times the tokens of the micro-batch. Here
what follows a document's last token is nothing, and the mean is that of each document, times its tokens: what Megatron
computes where a document has a row and a micro-batch of its own, whatever shares its row.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.hot_switch.data.row_parts import gather_rows, own_positions
from megatron_ext.patching import Patch

__all__ = ["PredictionReport", "RowDocuments", "patches", "tell_documents"]

_MODULE = "megatron.core.transformer.multi_token_prediction"
_VALUES = ("loss_values", "correct_values", "total_values")
"""What Megatron keeps for its log, by its own names: one number for each layer."""

_told: RowDocuments | None = None


class RowDocuments:
    """The documents of a micro-batch, at the positions of rows that this rank has."""

    def __init__(self, segments: torch.Tensor, device: torch.device, group: Any) -> None:
        """Number the documents.

        Args:
            segments: `PackedBatch.segments`, on the CPU.
            device: of the model.
            group: process group of the ranks that share rows.
        """
        rows, most = segments.shape[0], max(1, int(segments.max()) + 1)
        numbers = segments + most * torch.arange(rows)[:, None]
        after = torch.nn.functional.pad(segments[:, 1:], (0, 1), value=-1)
        self._group = group
        # Padding has a number, too, that is nobody's.
        self._count = rows * most + 1
        numbers = numbers.masked_fill(segments < 0, rows * most)
        self._numbers = own_positions(numbers, group).to(device, non_blocking=True)
        self._ends = own_positions((after != segments) | (segments < 0), group).to(device, non_blocking=True)
        self._padding = own_positions(segments < 0, group).to(device, non_blocking=True)

    def shifted(self, values: torch.Tensor) -> torch.Tensor:
        """Return at each position what `values` have at the next one; 0 at the end of a document.

        Args:
            values: (rows, positions).
        """
        whole = gather_rows(values.t(), self._group).t()
        return own_positions(torch.roll(whole, -1, dims=1), self._group).masked_fill(self._ends, 0)

    def next_padding(self, positions: int) -> torch.Tensor:
        """Return the padding of the next layer: also the positions whose documents have no token for it.

        Args:
            positions: those of a row that the caller has; with sequence parallelism a part of this rank's.
        """
        whole = gather_rows(self._padding.t().int(), self._group).t().bool()
        self._padding = own_positions(torch.roll(whole, -1, dims=1), self._group) | self._ends
        if positions == self._padding.shape[1]:
            return self._padding
        from megatron.core import parallel_state

        return self._padding.narrow(1, positions * parallel_state.get_tensor_model_parallel_rank(), positions)

    def sums(self, mask: torch.Tensor) -> torch.Tensor:
        """Return at each position the sum of a mask over its document; 0 in padding."""
        sums = torch.zeros(self._count, dtype=torch.float32, device=mask.device)
        sums.index_add_(0, self._numbers.reshape(-1), mask.reshape(-1).float())
        if self._group.size() > 1:
            dist.all_reduce(sums, group=self._group)
        sums[-1] = 0
        return sums[self._numbers]


def tell_documents(documents: RowDocuments | None) -> None:
    """Say what rows the next forward pass of a chunk with layers for multi-token prediction has.

    Args:
        documents: theirs; None for rows as Megatron knows them.
    """
    global _told
    _told = documents


def patches() -> list[Patch]:
    """Return the patches that keep documents of a row apart there."""
    return [
        Patch(
            name="prediction/look-ahead",
            target=f"{_MODULE}:roll_tensor",
            wrap=_wrap_roll,
            parameters=("tensor", "shifts", "dims"),
            reason="let multi-token prediction look no further than to the end of a document",
        ),
        Patch(
            name="prediction/losses",
            target=f"{_MODULE}:process_mtp_loss",
            wrap=_wrap_losses,
            parameters=("labels", "loss_mask", "compute_language_model_loss", "config"),
            reason="take the losses of multi-token prediction over each document of a packed row",
        ),
    ]


def _wrap_roll(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def roll_tensor(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if _told is None or tensor is None:
            return original(tensor, *args, **kwargs)
        rolled = _told.next_padding(tensor.shape[-1]) if tensor.dtype == torch.bool else _told.shifted(tensor)
        return rolled, rolled.sum()

    return roll_tensor


def _wrap_losses(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def process_mtp_loss(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given, told = bound.arguments, _told
        if told is None or given["labels"] is None:
            return original(*args, **kwargs)
        compute, mask = given["compute_language_model_loss"], given["loss_mask"]
        if mask is None:
            mask = torch.ones_like(given["labels"], dtype=torch.float32)
        tokens = told.sums(mask)

        def weighted(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            nonlocal mask
            mask = told.shifted(mask)
            # Megatron divides by the number of all that is left.
            weights = tokens / told.sums(mask).clamp(min=1) * mask.sum().clamp(min=1)
            loss: torch.Tensor = compute(labels, logits) * weights
            return loss

        given["compute_language_model_loss"] = weighted
        # Otherwise it multiplies by all tokens of the micro-batch.
        given["config"] = copy.copy(given["config"])
        given["config"].calculate_per_token_loss = False
        return original(*bound.args, **bound.kwargs)

    return process_mtp_loss


class PredictionReport:
    """Adds up what guests' layers for multi-token prediction report, and puts it into Megatron's report of home's.

    A reported loss is the mean over the documents of the step, weighted by their tokens.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        """Prepare.

        Args:
            config: home's `TransformerConfig`.
            device: of the values.
        """
        self.layers = int(config.mtp_num_layers or 0)
        self._device = device
        self.start()

    def start(self) -> None:
        """Forget the last step."""
        self.sums = torch.zeros(len(_VALUES), self.layers, dtype=torch.float64, device=self._device)

    @contextmanager
    def apart(self, *, counts: bool) -> Iterator[None]:
        """Keep a guest's report apart from home's, and add it up.

        Args:
            counts: whether this rank's values are to be added.
        """
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        home: dict[str, Any] = MTPLossLoggingHelper.tracker
        found: dict[str, Any] = {}
        MTPLossLoggingHelper.tracker = found
        try:
            yield
        finally:
            MTPLossLoggingHelper.tracker = home
        if counts:
            self._add(found)

    def finish(self, tokens: torch.Tensor, sharing: int, *, adds: bool) -> None:
        """Make Megatron's report of home's layers one about those of all strategies.

        Args:
            tokens: predicted tokens of the step.
            sharing: home's ranks over which Megatron takes the mean of losses, and the sum of counts.
            adds: whether this rank adds the guests'; one of those ranks does.
        """
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        values = MTPLossLoggingHelper.tracker
        if not self.layers or _VALUES[0] not in values:
            return
        if adds:
            for number, name in enumerate(_VALUES):
                values[name] += self.sums[number].to(values[name].dtype)
        # Megatron divides by the number of micro-batches that a replica of its own would have.
        values[_VALUES[0]] *= sharing * get_num_microbatches() / tokens.clamp(min=1)

    def _add(self, found: Mapping[str, torch.Tensor]) -> None:
        for number, name in enumerate(_VALUES):
            if name in found:
                self.sums[number] += found[name].double()
