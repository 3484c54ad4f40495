# SPDX-License-Identifier: Apache-2.0
"""The list of every tensor of a GPT or a hybrid model, in the order of the model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from megatron_ext.params.gpt_shape import GptShape, LatentAttention
from megatron_ext.params.layer_parts import LayerPart
from megatron_ext.params.layer_tensors import UnitPlace, column, norm, row, whole
from megatron_ext.params.part_tensors import delta_net, linear_part, sparse_indexer, state_space_layer
from megatron_ext.params.tensors import (
    EMBEDDING_UNIT,
    FINAL_NORM_UNIT,
    OUTPUT_UNIT,
    GlobalTensor,
    Split,
    layer_unit,
    prediction_unit,
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
    """Every parameter and persistent buffer of a GPT or a hybrid model.

    The list is the same for all layer implementations: norms have names of their own
    (``input_layernorm``, ``pre_mlp_layernorm``) even where Transformer Engine keeps them inside the
    following linear layer; ``names.global_name`` translates.

    Args:
        shape: the model.

    Returns:
        Tensors in model order: embeddings, layers, those of multi-token prediction, final norm, output
        layer. With tied embeddings there is no tensor for the output layer; the word embedding carries its
        name in ``shared_with``.
    """
    tensors = list(_embedding(shape))
    for layer in range(shape.num_layers):
        place = UnitPlace(layer_unit(layer), layer)
        for part in shape.parts_of(layer):
            tensors += _part(shape.of_layer(layer), f"decoder.layers.{layer}.", place, part)
    for depth in range(shape.mtp_num_layers):
        tensors += _prediction_layer(shape, depth)
    final_norm = "decoder.final_norm" if shape.layer_kinds else "decoder.final_layernorm"
    tensors += norm(shape, final_norm, shape.hidden_size, UnitPlace(FINAL_NORM_UNIT))
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
    copies: tuple[str, ...] = ()
    if shape.share_embeddings_and_output_weights:
        copies = (OUTPUT_WEIGHT,)
    elif shape.mtp_num_layers:
        copies = (WORD_EMBEDDING,)  # it embeds the tokens once more
    yield _vocabulary(shape, WORD_EMBEDDING, EMBEDDING_UNIT, copies)
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


def _part(shape: GptShape, prefix: str, place: UnitPlace, part: LayerPart) -> Iterator[GlobalTensor]:
    """A part of a layer, with the norm before it."""
    mlp, attention = prefix + "mlp.", prefix + "self_attention."
    if part == "state_space":
        yield from state_space_layer(shape, prefix, place)
        return
    before = "pre_mlp_layernorm" if part in ("mlp", "experts", "mlp_linear") else "input_layernorm"
    yield from norm(shape, prefix + before, shape.hidden_size, place)
    if part == "experts":
        yield from _experts(shape, mlp, place)
    elif part == "mlp":
        yield from _mlp(shape, mlp, place, shape.ffn_hidden_size, bias=shape.add_bias_linear)
    elif part == "mlp_linear":
        yield from linear_part(shape, mlp, place)
    elif part == "attention_linear":
        yield from linear_part(shape, attention, place)
    elif part == "delta_net":
        yield from delta_net(shape, attention, place)
    else:
        yield from _attention(shape, attention, place, is_sparse=part == "sparse_attention")


def _prediction_layer(shape: GptShape, depth: int) -> Iterator[GlobalTensor]:
    """A layer of multi-token prediction, which has one of the model's layers inside, or several of a hybrid model's."""
    prefix, place = f"mtp.layers.{depth}.", UnitPlace(prediction_unit(depth))
    inner = prefix + "mtp_model_layer."
    for name in ("enorm", "hnorm"):
        yield from norm(shape, prefix + name, shape.hidden_size, place)
    yield column(shape, prefix + "eh_proj.weight", (shape.hidden_size, 2 * shape.hidden_size), place, None)
    for number, part in enumerate(shape.prediction_parts):
        yield from _part(shape, f"{inner}layers.{number}." if shape.layer_kinds else inner, place, part)
    yield from norm(shape, prefix + "final_layernorm", shape.hidden_size, place)


def _attention(shape: GptShape, prefix: str, place: UnitPlace, *, is_sparse: bool) -> Iterator[GlobalTensor]:
    if shape.latent_attention is not None:
        yield from _latent_attention(shape, shape.latent_attention, prefix, place, is_sparse=is_sparse)
        return
    heads = shape.num_attention_heads * shape.head_size
    fused = qkv_rows(shape)[-1].value[1]
    if shape.learnable_softmax:
        yield column(
            shape, prefix + "core_attention.softmax_offset", (shape.num_attention_heads,), place, None
        )
    yield from row(
        shape, prefix + "linear_proj", (shape.hidden_size, heads), place, None, bias=shape.add_bias_linear
    )
    yield column(shape, prefix + "linear_qkv.weight", (fused, shape.hidden_size), place, None)
    if shape.add_bias_linear or shape.add_qkv_bias:
        yield column(shape, prefix + "linear_qkv.bias", (fused,), place, None)
    if shape.qk_layernorm:
        over_heads = shape.qk_norm_over_heads
        for name, count in (("q_layernorm", shape.num_attention_heads), ("k_layernorm", shape.query_groups)):
            yield from norm(shape, prefix + name, (count if over_heads else 1) * shape.head_size, place)


def _latent_attention(
    shape: GptShape, latent: LatentAttention, prefix: str, place: UnitPlace, *, is_sparse: bool
) -> Iterator[GlobalTensor]:
    heads = shape.num_attention_heads
    query = latent.qk_head_dim + latent.qk_pos_emb_head_dim
    common = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
    down = column if latent.cut_down_projections else whole
    if shape.learnable_softmax:
        yield column(shape, prefix + "core_attention.softmax_offset", (heads,), place, None)
    if is_sparse:
        yield from sparse_indexer(shape, latent.q_lora_rank or shape.hidden_size, prefix, place)
    values = (shape.hidden_size, heads * latent.v_head_dim)
    yield from row(shape, prefix + "linear_proj", values, place, None, bias=shape.add_bias_linear)
    if latent.q_lora_rank is None:
        yield column(shape, prefix + "linear_q_proj.weight", (heads * query, shape.hidden_size), place, None)
    else:
        yield down(shape, prefix + "linear_q_down_proj.weight", (latent.q_lora_rank, shape.hidden_size), place, None)
        yield column(shape, prefix + "linear_q_up_proj.weight", (heads * query, latent.q_lora_rank), place, None)
    yield down(shape, prefix + "linear_kv_down_proj.weight", (common, shape.hidden_size), place, None)
    rows = heads * (latent.qk_head_dim + latent.v_head_dim)
    yield column(shape, prefix + "linear_kv_up_proj.weight", (rows, latent.kv_lora_rank), place, None)
    if shape.qk_layernorm:
        if latent.q_lora_rank is not None:
            yield from norm(shape, prefix + "q_layernorm", latent.q_lora_rank, place)
        yield from norm(shape, prefix + "kv_layernorm", latent.kv_lora_rank, place)


def _mlp(
    shape: GptShape, prefix: str, place: UnitPlace, width: int, *, bias: bool, expert: int | None = None
) -> Iterator[GlobalTensor]:
    outer = shape.hidden_size if expert is None else shape.expert_width
    blocks = (width, width) if shape.gated_linear_unit else (width,)
    yield column(shape, prefix + "linear_fc1.weight", (sum(blocks), outer), place, expert, blocks)
    if bias:
        yield column(shape, prefix + "linear_fc1.bias", (sum(blocks),), place, expert, blocks)
    yield from row(shape, prefix + "linear_fc2", (outer, width), place, expert, bias=bias)


def _experts(shape: GptShape, prefix: str, place: UnitPlace) -> Iterator[GlobalTensor]:
    experts = shape.num_moe_experts or 0
    yield whole(shape, prefix + "router.weight", (experts, shape.hidden_size), place)
    if shape.add_bias_linear:
        yield whole(shape, prefix + "router.bias", (experts,), place)
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
                unit=place.unit,
                layer=place.layer,
                kind="buffer",
            )
    if shape.moe_latent_size is not None:
        for name, size in (
            ("fc1_latent_proj", (shape.moe_latent_size, shape.hidden_size)),
            ("fc2_latent_proj", (shape.hidden_size, shape.moe_latent_size)),
        ):
            yield whole(shape, f"{prefix}{name}.weight", size, place)
            if shape.add_bias_linear:
                yield whole(shape, f"{prefix}{name}.bias", size[:1], place)
    for expert in range(experts):
        name, width = f"{prefix}experts.{expert}.", shape.expert_ffn_size
        yield from _mlp(shape, name, place, width, bias=shape.add_bias_linear, expert=expert)
    if shape.moe_shared_expert_intermediate_size is not None:
        if shape.moe_shared_expert_gate:
            yield whole(shape, prefix + "shared_experts.gate_weight", (1, shape.hidden_size), place)
        width = shape.moe_shared_expert_intermediate_size
        yield from _mlp(shape, prefix + "shared_experts.", place, width, bias=False)
