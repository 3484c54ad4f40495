# SPDX-License-Identifier: Apache-2.0
"""Attention within the documents of packed rows, one document at a time.

Megatron's unfused attention takes packed rows with a mask, for which it computes and keeps a score for every pair of
positions of a row. Here time grows with the sum of the squared lengths of the documents, and memory with the length of
the row, because torch's scaled dot product attention keeps no scores; on a GPU it is a fused kernel in fp16 and bf16.

With context parallelism a rank has the queries of its parts of the rows, and gathers the keys and values of all of
them.

On Transformer Engine whole rows go to its own attention for documents of several lengths (THD), all at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from megatron_ext.errors import UserError
from megatron_ext.hot_switch.data.row_parts import Part, gather_rows, row_parts

__all__ = ["attend_by_document", "attend_within_documents"]

_SMALLEST_BLOCK = 128
"""Of queries, where a window is shorter."""

_FUSED_DTYPES = {torch.float16, torch.bfloat16}
"""Of which Transformer Engine has kernels for documents of several lengths; its unfused attention pads them all."""


def attend_within_documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    parts: Sequence[Part] | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Let every position attend to itself and to what precedes it in its document.

    Args:
        query: (positions, rows, heads, channels), of the positions in `parts`.
        key: (positions, rows, groups, channels), of whole rows; every group serves as many consecutive heads as any
            other.
        value: the same, except for the number of channels.
        lengths: `document_lengths` of the rows, on the CPU.
        scale: multiplies the scores.
        dropout: probability with which a weight is dropped.
        parts: the stretches of a row that `query` has, ascending; None for the whole row.
        window: how many positions before its own one attends to at most; None for all.

    Returns:
        (positions of `query`, rows, heads * channels of `value`); zeros where there is padding.
    """
    parts = [(0, key.shape[0])] if parts is None else parts
    rows = []
    for of_row, *tensors in zip(lengths.tolist(), query.unbind(1), key.unbind(1), value.unbind(1), strict=True):
        documents = [length for length in of_row if length]
        sizes = [*documents, key.shape[0] - sum(documents)]
        # Split at once: the gradient of a slice of its own would be as large as the row, for every document.
        keys, values = (torch.split(tensor, sizes) for tensor in tensors[1:])
        stretches = _stretches(documents, parts)
        queries = torch.split(tensors[0], [last - first for _, first, last in stretches])
        attended = []
        for own, (document, _, last) in zip(queries, stretches, strict=True):
            if document is None:
                attended.append(own.new_zeros((*own.shape[:2], value.shape[-1])))
            else:
                attend = _attend if window is None or last <= window + 1 else partial(_attend_in_window, window)
                attended.append(attend(own, keys[document][:last], values[document][:last], scale, dropout))
        if all(document is None for document, _, _ in stretches):
            # It attends nevertheless, at its first position: without gradients of all parameters, and of keys and
            # values, Megatron's gradient reduction and other ranks would wait forever.
            alone = _attend(tensors[0][:1], tensors[1][:1], tensors[2][:1], scale, dropout)
            rest = tensors[0].shape[0] - 1
            attended = [alone, tensors[0].new_zeros((rest, *alone.shape[1:]))]
        rows.append(torch.cat(attended))
    return torch.stack(rows, dim=1).flatten(2)


def _stretches(documents: Sequence[int], parts: Sequence[Part]) -> list[tuple[int | None, int, int]]:
    """Cut the parts of a row at the ends of documents.

    Returns:
        (document, first, last) of each stretch in order, counted from the document's first position; padding has the
        document None.
    """
    found: list[tuple[int | None, int, int]] = []
    ends = list(accumulate(documents))
    for start, end in parts:
        for document, (length, after) in enumerate(zip(documents, ends, strict=True)):
            first, last = max(start, after - length), min(end, after)
            if first < last:
                found.append((document, first - (after - length), last - (after - length)))
        padding = end - max(start, ends[-1] if ends else 0)
        if padding > 0:
            found.append((None, 0, padding))
    return found


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    dropout: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend within one document: (positions, heads, channels), the last ones of the keys' positions, to the same.

    To all that precede, or to those of (queries, keys) that the mask says.
    """
    whole = mask is None and query.shape[0] == key.shape[0]
    if mask is None and not whole:
        # The class is a tensor in all but its type.
        mask = cast("torch.Tensor", causal_lower_right(query.shape[0], key.shape[0]))
    context = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=whole,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return context[0].transpose(0, 1)


def _attend_in_window(
    window: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, dropout: float
) -> torch.Tensor:
    """Attend as `_attend` does, to the last `window` positions before each one's own and to that.

    Blocks of queries as long as the window need the keys of two blocks at most: memory and time grow with the length of
    the document times the window.
    """
    before, found = key.shape[0] - query.shape[0], []
    size = max(window, _SMALLEST_BLOCK)
    for first in range(0, query.shape[0], size):
        own = query[first : first + size]
        last = before + first + own.shape[0]
        start = max(before + first - window, 0)
        places = torch.arange(start, last, device=query.device)
        away = places[-own.shape[0] :, None] - places
        mask = (away >= 0) & (away <= window)
        found.append(_attend(own, key[start:last], value[start:last], scale, dropout, mask))
    return torch.cat(found)


def attend_by_document(model: torch.nn.Module) -> None:
    """Let a GPT take the lengths of documents in place of an attention mask.

    With a mask, as in evaluation, it does what it did, except for context parallelism, which Megatron's local attention
    does not know. There a row is a document where there is no mask. Samples of conversations, which evaluation has with
    --sft, say themselves where they begin; Megatron's local attention does not know these either.

    Args:
        model: the core attention modules of its layers are changed in place: `DotProductAttention` or
            `TEDotProductAttention`.

    Raises:
        UserError: it has others, which ignore documents, or compute what this would not.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    for attention in model.modules():
        module = getattr(attention, "core_attention", None)
        if type(module) is DotProductAttention:
            _take_lengths(module)
        elif HAVE_TE and type(module) is TEDotProductAttention:
            _take_lengths_on_transformer_engine(module, getattr(attention, "softmax_scale", None))
        elif module is not None:
            raise UserError(
                f"hot switching: the model's core attention is {type(module).__name__}, which does not keep the "
                "documents of a row apart; build the model with Megatron's own, or, if yours keeps to the mask that it "
                "is given, use --transformer-impl local with --hot-switch-attention rows"
            )


def _take_lengths(module: Any) -> None:
    original = module.forward
    # Of this layer: --window-attn-skip-freq gives some layers none.
    window = module.scale_mask_softmax.window_size

    @functools.wraps(original)
    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        group = module.pg_collection.cp
        packed = kwargs.get("packed_seq_params")
        # Megatron leaves out the dimension of rows, of which there is one then.
        if packed is not None:
            if group.size() > 1:
                raise RuntimeError("attention over parts of rows takes no packed samples, but the model was given some")
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
            attention_mask = packed.cu_seqlens_q.diff().cpu().long()[None]
        if attention_mask is None:
            attention_mask = torch.full((query.shape[1], 1), query.shape[0] * group.size())
        elif not _are_lengths(attention_mask):
            if group.size() > 1:
                raise RuntimeError("attention over parts of rows takes no mask, but the model was given one")
            return original(query, key, value, attention_mask, *rest, **kwargs)
        # Megatron divides by the layer's number before the scores are made, and multiplies by it afterwards.
        scale = module.softmax_scale * (module.scale_mask_softmax.scale or 1.0)
        dropout = module.attention_dropout.p if module.training else 0.0
        before = None if window is None else window[0]
        return _attend_to_rows(module, query, key, value, attention_mask, group, scale, dropout, before)

    module.forward = forward


def _take_lengths_on_transformer_engine(module: Any, scale: float | None) -> None:
    """Change one module.

    Args:
        module: a `TEDotProductAttention`.
        scale: of the scores, as latent attention gives it; None for what the config says.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnBackend

    original, config = module.forward, module.config
    is_fused = config.attention_backend not in (AttnBackend.unfused, AttnBackend.local)
    if scale is None:
        scale = config.softmax_scale or config.kv_channels**-0.5

    @functools.wraps(original)
    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        if attention_mask is None or not _are_lengths(attention_mask):
            return original(query, key, value, attention_mask, *rest, **kwargs)
        group = parallel_state.get_context_parallel_group()
        # Its attention over parts of rows wants every document cut alike, and its kernels for documents want values as
        # wide as keys, which those of latent attention are not.
        fits = is_fused and query.dtype in _FUSED_DTYPES and value.shape[-1] == key.shape[-1]
        if group.size() > 1 or not fits:
            dropout = config.attention_dropout if module.training else 0.0
            return _attend_to_rows(module, query, key, value, attention_mask, group, scale, dropout)
        return _attend_at_once(original, query, key, value, attention_mask, *rest, **kwargs)

    module.forward = forward


def _attend_at_once(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    *rest: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Attend within the documents of all rows in one call of `TEDotProductAttention.forward`; see there."""
    _require_rows(lengths, query)
    positions, rows = query.shape[:2]
    joined = [tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value)]
    kwargs["packed_seq_params"] = _packed(tuple(map(tuple, lengths.tolist())), positions, query.device)
    context = attend(*joined, None, *rest, **kwargs)
    return context.reshape(rows, positions, -1).transpose(0, 1).contiguous()


@functools.lru_cache(maxsize=64)
def _packed(lengths: tuple[tuple[int, ...], ...], positions: int, device: torch.device) -> Any:
    """Tell Transformer Engine where documents begin; all layers of a micro-batch ask for the same.

    Padding at the end of a row is one more document: the kernels leave what belongs to none undefined.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    found = [length for row in lengths for length in (*row, positions - sum(row)) if length]
    starts = torch.tensor([0, *accumulate(found)], dtype=torch.int32)
    if device.type == "cuda":
        # From other memory the copy would wait for all that the device still has to do.
        starts = starts.pin_memory().to(device, non_blocking=True)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=max(found),
        max_seqlen_kv=max(found),
    )


def _attend_to_rows(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    group: Any,
    scale: float,
    dropout: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend one document at a time, from this rank's parts of the rows to all of them."""
    _require_rows(lengths, query, group.size())
    parts = row_parts(query.shape[0], group)
    if group.size() > 1:
        # Latent attention has values of another size.
        sizes = [key.shape[-1], value.shape[-1]]
        key, value = torch.split(gather_rows(torch.cat((key, value), dim=-1), group), sizes, dim=-1)
    with _generator(module, dropout):
        return attend_within_documents(
            query, key, value, lengths, scale=scale, dropout=dropout, parts=parts, window=window
        )


def _are_lengths(mask: torch.Tensor) -> bool:
    return mask.dtype == torch.int64  # masks are bool


def _generator(module: Any, dropout: float) -> contextlib.AbstractContextManager[None]:
    """Draw from the generator that Megatron drops out attention with: ranks hold different heads."""
    from megatron.core import tensor_parallel

    if not dropout or module.config.sequence_parallel:
        return contextlib.nullcontext()
    forked: contextlib.AbstractContextManager[None] = tensor_parallel.get_cuda_rng_tracker().fork()
    return forked


def _require_rows(lengths: torch.Tensor, query: torch.Tensor, parts: int = 1) -> None:
    """Check that documents lie in the rows that the model was given.

    Raises:
        UserError: they cannot.
    """
    rows, positions, longest = query.shape[1], query.shape[0] * parts, int(lengths.sum(1).max())
    if lengths.shape[0] != rows or longest > positions:
        raise UserError(
            f"hot switching: the model is given {rows} rows of {positions} positions, and the documents of the "
            f"micro-batch are {lengths.shape[0]} rows of up to {longest}; let get_batch return what it takes from its "
            "iterator whole"
        )
