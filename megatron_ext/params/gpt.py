# SPDX-License-Identifier: Apache-2.0
"""The list of every tensor of a GPT, in the order of the model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from megatron_ext.params.gpt_shape import GptShape, LatentAttention
from megatron_ext.params.tensors import (
    EMBEDDING_UNIT,
    FINAL_NORM_UNIT,
    OUTPUT_UNIT,
    GlobalTensor,
    Split,
    layer_unit,
)

WORD_EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_WEIGHT = "output_layer.weight"


@dataclass(frozen=True)
class QkvRows:
    """Rows of the fused QKV projection that belong to one query group, as ``(start, stop)`` pairs."""

    query: tuple[int, int]
    """All query heads of the group."""

    gate: tuple[int, int]
    """Output gates of the group's heads; an empty range without ``attention_output_gate``."""

    key: tuple[int, int]
    """The group's key head."""

    value: tuple[int, int]
    """The group's value head."""


# A comparison of layouts asks for the same model again and again.
@functools.lru_cache(maxsize=16)
def gpt_parameters(shape: GptShape) -> tuple[GlobalTensor, ...]:
    """Every parameter and persistent buffer of a GPT.

    The list is the same for all layer implementations: norms have names of their own
    (``input_layernorm``, ``pre_mlp_layernorm``) even where Transformer Engine keeps them inside the
    following linear layer; ``names.global_name`` translates.

    Args:
        shape: the model.

    Returns:
        Tensors in model order: embeddings, layers, final norm, output layer. With tied embeddings there is
        no tensor for the output layer; the word embedding carries its name in ``shared_with``.
    """
    tensors = list(_embedding(shape))
    for layer in range(shape.num_layers):
        tensors += _layer(shape, layer)
    tensors += _norm(shape, "decoder.final_layernorm", shape.hidden_size, FINAL_NORM_UNIT, None)
    if not shape.share_embeddings_and_output_weights:
        tensors.append(_vocabulary(shape, OUTPUT_WEIGHT, OUTPUT_UNIT, ()))
    return tuple(tensors)


def qkv_rows(shape: GptShape) -> tuple[QkvRows, ...]:
    """Which rows of ``self_attention.linear_qkv`` are which heads, one entry per query group."""
    queries = shape.num_attention_heads // shape.query_groups * shape.head_size
    gates = queries if shape.attention_output_gate else 0
    groups = []
    row = 0
    for _ in range(shape.query_groups):
        bounds = [row]
        for size in (queries, gates, shape.head_size, shape.head_size):
            bounds.append(bounds[-1] + size)
        groups.append(QkvRows(*pairwise(bounds)))
        row = bounds[-1]
    return tuple(groups)


def _embedding(shape: GptShape) -> Iterator[GlobalTensor]:
    tied = (OUTPUT_WEIGHT,) if shape.share_embeddings_and_output_weights else ()
    yield _vocabulary(shape, WORD_EMBEDDING, EMBEDDING_UNIT, tied)
    if shape.max_sequence_length:
        yield GlobalTensor(
            name="embedding.position_embeddings.weight",
            dtype=shape.dtype,
            unit=EMBEDDING_UNIT,
            shape=(shape.max_sequence_length, shape.hidden_size),
        )


def _vocabulary(shape: GptShape, name: str, unit: str, shared_with: tuple[str, ...]) -> GlobalTensor:
    padding = shape.vocab_size is not None and shape.vocab_size < shape.padded_vocab_size
    return GlobalTensor(
        name=name,
        shape=(shape.padded_vocab_size, shape.hidden_size),
        dtype=shape.dtype,
        unit=unit,
        split=Split(axis=0, blocks=(shape.padded_vocab_size,)),
        shared_with=shared_with,
        valid_rows=shape.vocab_size if padding else None,
    )


def _layer(shape: GptShape, layer: int) -> Iterator[GlobalTensor]:
    prefix = f"decoder.layers.{layer}."
    yield from _norm(shape, prefix + "input_layernorm", shape.hidden_size, layer_unit(layer), layer)
    yield from _attention(shape, prefix + "self_attention.", layer)
    yield from _norm(shape, prefix + "pre_mlp_layernorm", shape.hidden_size, layer_unit(layer), layer)
    if shape.is_moe_layer(layer):
        yield from _experts(shape, prefix + "mlp.", layer)
    else:
        yield from _mlp(shape, prefix + "mlp.", layer, None, shape.ffn_hidden_size, shape.add_bias_linear)


def _attention(shape: GptShape, prefix: str, layer: int) -> Iterator[GlobalTensor]:
    if shape.latent_attention is not None:
        yield from _latent_attention(shape, shape.latent_attention, prefix, layer)
        return
    heads = shape.num_attention_heads * shape.head_size
    fused = qkv_rows(shape)[-1].value[1]
    if shape.learnable_softmax:
        yield _column(
            shape, prefix + "core_attention.softmax_offset", (shape.num_attention_heads,), layer, None
        )
    yield from _linear(
        shape, prefix + "linear_proj", (shape.hidden_size, heads), layer, None, bias=shape.add_bias_linear
    )
    yield _column(shape, prefix + "linear_qkv.weight", (fused, shape.hidden_size), layer, None)
    if shape.add_bias_linear or shape.add_qkv_bias:
        yield _column(shape, prefix + "linear_qkv.bias", (fused,), layer, None)
    if shape.qk_layernorm:
        for name in ("q_layernorm", "k_layernorm"):
            yield from _norm(shape, prefix + name, shape.head_size, layer_unit(layer), layer)


def _latent_attention(
    shape: GptShape, latent: LatentAttention, prefix: str, layer: int
) -> Iterator[GlobalTensor]:
    heads = shape.num_attention_heads
    query = latent.qk_head_dim + latent.qk_pos_emb_head_dim
    common = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
    down = _column if latent.cut_down_projections else _whole
    if shape.learnable_softmax:
        yield _column(shape, prefix + "core_attention.softmax_offset", (heads,), layer, None)
    values = (shape.hidden_size, heads * latent.v_head_dim)
    yield from _linear(shape, prefix + "linear_proj", values, layer, None, bias=shape.add_bias_linear)
    if latent.q_lora_rank is None:
        yield _column(shape, prefix + "linear_q_proj.weight", (heads * query, shape.hidden_size), layer, None)
    else:
        yield down(shape, prefix + "linear_q_down_proj.weight", (latent.q_lora_rank, shape.hidden_size), layer, None)
        yield _column(shape, prefix + "linear_q_up_proj.weight", (heads * query, latent.q_lora_rank), layer, None)
    yield down(shape, prefix + "linear_kv_down_proj.weight", (common, shape.hidden_size), layer, None)
    rows = heads * (latent.qk_head_dim + latent.v_head_dim)
    yield _column(shape, prefix + "linear_kv_up_proj.weight", (rows, latent.kv_lora_rank), layer, None)
    if shape.qk_layernorm:
        if latent.q_lora_rank is not None:
            yield from _norm(shape, prefix + "q_layernorm", latent.q_lora_rank, layer_unit(layer), layer)
        yield from _norm(shape, prefix + "kv_layernorm", latent.kv_lora_rank, layer_unit(layer), layer)


def _mlp(
    shape: GptShape, prefix: str, layer: int, expert: int | None, width: int, bias: bool
) -> Iterator[GlobalTensor]:
    blocks = (width, width) if shape.gated_linear_unit else (width,)
    yield _column(
        shape, prefix + "linear_fc1.weight", (sum(blocks), shape.hidden_size), layer, expert, blocks
    )
    if bias:
        yield _column(shape, prefix + "linear_fc1.bias", (sum(blocks),), layer, expert, blocks)
    yield from _linear(shape, prefix + "linear_fc2", (shape.hidden_size, width), layer, expert, bias=bias)


def _experts(shape: GptShape, prefix: str, layer: int) -> Iterator[GlobalTensor]:
    experts = shape.num_moe_experts or 0
    yield _replicated(shape, prefix + "router.weight", (experts, shape.hidden_size), layer)
    if shape.add_bias_linear:
        yield _replicated(shape, prefix + "router.bias", (experts,), layer)
    for name, present in (
        ("expert_bias", shape.moe_router_enable_expert_bias),
        ("qb_beta", shape.moe_router_quantile_balancing),
    ):
        if present:
            # The router keeps these in fp32 whatever the parameters' type is.
            yield GlobalTensor(
                name=f"{prefix}router.{name}",
                shape=(experts,),
                dtype=torch.float32,
                unit=layer_unit(layer),
                layer=layer,
                kind="buffer",
            )
    for expert in range(experts):
        yield from _mlp(
            shape, f"{prefix}experts.{expert}.", layer, expert, shape.expert_ffn_size, shape.add_bias_linear
        )
    if shape.moe_shared_expert_intermediate_size is not None:
        if shape.moe_shared_expert_gate:
            yield _replicated(shape, prefix + "shared_experts.gate_weight", (1, shape.hidden_size), layer)
        yield from _mlp(
            shape, prefix + "shared_experts.", layer, None, shape.moe_shared_expert_intermediate_size, False
        )


def _linear(
    shape: GptShape, prefix: str, size: tuple[int, int], layer: int, expert: int | None, *, bias: bool
) -> Iterator[GlobalTensor]:
    """A row parallel linear layer: the input axis is cut, the bias is not."""
    yield GlobalTensor(
        name=prefix + ".weight",
        shape=size,
        dtype=shape.dtype,
        unit=layer_unit(layer),
        layer=layer,
        expert=expert,
        split=Split(axis=1, blocks=(size[1],)),
    )
    if bias:
        yield GlobalTensor(
            name=prefix + ".bias",
            shape=size[:1],
            dtype=shape.dtype,
            unit=layer_unit(layer),
            layer=layer,
            expert=expert,
        )


def _column(
    shape: GptShape,
    name: str,
    size: tuple[int, ...],
    layer: int,
    expert: int | None,
    blocks: tuple[int, ...] = (),
) -> GlobalTensor:
    return GlobalTensor(
        name=name,
        shape=size,
        dtype=shape.dtype,
        unit=layer_unit(layer),
        layer=layer,
        expert=expert,
        split=Split(axis=0, blocks=blocks or size[:1]),
    )


def _whole(shape: GptShape, name: str, size: tuple[int, ...], layer: int, expert: int | None) -> GlobalTensor:
    return GlobalTensor(name=name, shape=size, dtype=shape.dtype, unit=layer_unit(layer), layer=layer, expert=expert)


def _replicated(shape: GptShape, name: str, size: tuple[int, ...], layer: int) -> GlobalTensor:
    return GlobalTensor(name=name, shape=size, dtype=shape.dtype, unit=layer_unit(layer), layer=layer)


def _norm(shape: GptShape, prefix: str, size: int, unit: str, layer: int | None) -> Iterator[GlobalTensor]:
    for name in ("weight", "bias") if shape.normalization == "LayerNorm" else ("weight",):
        yield GlobalTensor(name=f"{prefix}.{name}", shape=(size,), dtype=shape.dtype, unit=unit, layer=layer)
