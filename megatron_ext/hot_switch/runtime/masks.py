# SPDX-License-Identifier: Apache-2.0
"""Tells every forward pass where its micro-batch has documents, whatever the user's `get_batch` does about masks.

Megatron's own way, a mask in the batch, does not reach the stages in the middle of a pipeline. Routers with auxiliary
losses, or biases that follow the tokens of experts, also receive which positions are padding, and those with losses by
sequence the documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.hot_switch.data.row_parts import own_positions
from megatron_ext.hot_switch.data.rows import PackedBatch, document_lengths, document_mask
from megatron_ext.hot_switch.runtime.document_attention import attend_by_document
from megatron_ext.hot_switch.runtime.prediction_losses import RowDocuments, tell_documents
from megatron_ext.hot_switch.runtime.router_losses import reported_losses
from megatron_ext.seams.router import documents_of_rows

__all__ = ["DocumentMasks"]

# `attention_mask` among the positional arguments of GPTModel.forward.
_PLACE = 2


class DocumentMasks:
    """Counts the forward passes of each model chunk; schedules run the micro-batches of a chunk in order."""

    def __init__(self, chunks: Sequence[Any], device: torch.device, *, attention: str) -> None:
        """Hook into the chunks.

        Args:
            chunks: this rank's GPTModels, not wrapped.
            device: of the masks.
            attention: "documents", one at a time; "rows", with a mask for Megatron's own attention; or "padded", as the
                first, where a row has one document and recurrent layers need not be told.
        """
        self._device = device
        self._by_document = attention != "rows"
        if self._by_document:
            for chunk in chunks:
                attend_by_document(chunk)
        self._batches: Sequence[PackedBatch] | None = None
        self._passes = [0] * len(chunks)
        config = chunks[0].config
        self._tells_padding = bool(reported_losses(config)) or config.moe_router_enable_expert_bias
        self._routers = [
            module
            for chunk in chunks
            for module in chunk.modules()
            if hasattr(module, "get_aux_loss_coeff") and module.get_aux_loss_coeff("seq_aux_loss")
        ]
        self._config = config
        for number, chunk in enumerate(chunks):
            chunk.register_forward_pre_hook(partial(self._give, number), with_kwargs=True)

    @contextmanager
    def of(self, batches: Sequence[PackedBatch]) -> Iterator[None]:
        """Give the masks of these micro-batches, each once to each chunk. Outside, forward passes are left alone.

        Raises:
            UserError: the chunks ran another number of forward passes.
        """
        self._batches, self._passes = batches, [0] * len(self._passes)
        documents = [_documents(self._config, batch.segments, self._device) for batch in batches if self._routers]
        try:
            with documents_of_rows(self._routers, documents):
                yield
        finally:
            self._batches = None
            tell_documents(None)
        if any(passes != len(batches) for passes in self._passes):
            raise UserError(
                f"hot switching: the forward step ran {self._passes} forward passes of this rank's model chunks for "
                f"{len(batches)} micro-batches; let it run the model exactly once for each"
            )

    def _give(
        self, chunk: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        from megatron.core import parallel_state

        if self._batches is None:
            return None
        number = self._passes[chunk]
        self._passes[chunk] += 1
        if number >= len(self._batches):
            return None
        segments = self._batches[number].segments
        if getattr(module, "mtp_process", False):
            group = parallel_state.get_context_parallel_group()
            tell_documents(RowDocuments(segments, self._device, group))
        if self._by_document:
            # Lengths stay where they can be read without waiting for the device.
            mask = document_lengths(segments)
        else:
            mask = document_mask(segments.to(self._device, non_blocking=True))
        if self._tells_padding:
            kwargs = {**kwargs, "padding_mask": _padding_mask(module, segments.to(self._device, non_blocking=True))}
        if len(args) > _PLACE:
            return (*args[:_PLACE], mask, *args[_PLACE + 1 :]), kwargs
        return args, {**kwargs, "attention_mask": mask}


def _documents(config: Any, segments: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, int]:
    """Return the document of each token that this rank's routers see of a micro-batch, and how many there are."""
    from megatron.core import parallel_state

    # Counted where it can be read without waiting for the device.
    rows, most = segments.shape[0], int(segments.max()) + 1
    numbers = segments.clamp(min=0) + most * torch.arange(rows)[:, None]
    numbers = own_positions(numbers, parallel_state.get_context_parallel_group())
    if config.sequence_parallel:
        numbers = _tensor_parallel_part(numbers)
    # Megatron has positions before rows.
    return numbers.t().reshape(-1).to(device, non_blocking=True), max(1, most) * rows


def _tensor_parallel_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's positions where sequence parallelism cuts rows."""
    from megatron.core import parallel_state

    part = tensor.shape[1] // parallel_state.get_tensor_model_parallel_world_size()
    return tensor.narrow(1, part * parallel_state.get_tensor_model_parallel_rank(), part).contiguous()


def _padding_mask(module: Any, segments: torch.Tensor) -> torch.Tensor:
    """Return where a micro-batch has padding, as the model expects it: bool, shape (rows, positions)."""
    from megatron.core import parallel_state

    padding = own_positions(segments < 0, parallel_state.get_context_parallel_group())
    if module.pre_process or not module.config.sequence_parallel:
        return padding
    # Megatron cuts it along with the embeddings only.
    return _tensor_parallel_part(padding)
