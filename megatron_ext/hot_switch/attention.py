# SPDX-License-Identifier: Apache-2.0
"""Attention within the documents of packed rows, one document at a time.

Megatron's unfused attention takes packed rows with a mask, for which it computes and keeps a score for every pair of
positions of a row. Here time grows with the sum of the squared lengths of the documents, and memory with the length of
the row, because torch's scaled dot product attention keeps no scores; on a GPU it is a fused kernel in fp16 and bf16.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attend_by_document", "attend_within_documents"]


def attend_within_documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Let every position attend to itself and to what precedes it in its document.

    Args:
        query: (positions, rows, heads, channels).
        key: (positions, rows, groups, channels); every group serves as many consecutive heads as any other.
        value: the same.
        lengths: `document_lengths` of the rows, on the CPU.
        scale: multiplies the scores.
        dropout: probability with which a weight is dropped.

    Returns:
        (positions, rows, heads * channels); zeros where there is padding.
    """
    rows = []
    for of_row, *tensors in zip(lengths.tolist(), query.unbind(1), key.unbind(1), value.unbind(1), strict=True):
        # A row without any attends at its first position, or a micro-batch of them would leave parameters without the
        # gradients that Megatron waits for.
        documents = [length for length in of_row if length] or [1]
        padding = query.shape[0] - sum(documents)
        # Split at once: the gradient of a slice of its own would be as large as the row, for every document.
        queries, keys, values = (torch.split(tensor, [*documents, padding]) for tensor in tensors)
        attended = [
            _attend(queries[place], keys[place], values[place], scale, dropout) for place in range(len(documents))
        ]
        rows.append(torch.cat([*attended, query.new_zeros(padding, *query.shape[2:])]))
    return torch.stack(rows, dim=1).flatten(2)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, dropout: float
) -> torch.Tensor:
    """Attend within one document: (positions, heads, channels) to the same."""
    context = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        dropout_p=dropout,
        is_causal=True,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return context[0].transpose(0, 1)


def attend_by_document(model: torch.nn.Module) -> None:
    """Let a GPT on Megatron's local implementation take the lengths of documents in place of an attention mask.

    With a mask, as in evaluation, it does what it did. Without one a row is a document.

    Args:
        model: its `DotProductAttention` modules are changed in place.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    for module in model.modules():
        if isinstance(module, DotProductAttention):
            _take_lengths(module)


def _take_lengths(module: Any) -> None:
    original = module.forward

    @functools.wraps(original)
    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        if attention_mask is None:
            attention_mask = torch.full((query.shape[1], 1), query.shape[0])
        elif attention_mask.dtype != torch.int64:  # masks are bool
            return original(query, key, value, attention_mask, *rest, **kwargs)
        # Megatron divides by the layer's number before the scores are made, and multiplies by it afterwards.
        scale = module.softmax_scale * (module.scale_mask_softmax.scale or 1.0)
        dropout = module.attention_dropout.p if module.training else 0.0
        with _generator(module, dropout):
            return attend_within_documents(query, key, value, attention_mask, scale=scale, dropout=dropout)

    module.forward = forward


def _generator(module: Any, dropout: float) -> contextlib.AbstractContextManager[None]:
    """Draw from the generator that Megatron drops out attention with: ranks hold different heads."""
    from megatron.core import tensor_parallel

    if not dropout or module.config.sequence_parallel:
        return contextlib.nullcontext()
    forked: contextlib.AbstractContextManager[None] = tensor_parallel.get_cuda_rng_tracker().fork()
    return forked
