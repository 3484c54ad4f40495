# SPDX-License-Identifier: Apache-2.0
"""Memory of activations, by Megatron's formula.

Megatron's formula (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", Table 2)
counts 18 h + 4 f bytes for a position and a layer, with h the hidden size and f the width of the MLP: 13 h of attention
and 5 h + 4 f of the MLP, each with its norm. It knows no other attention, no mixture of experts, no layers of state
spaces and no full recomputation. What layers of these keep of a position, on average, is given to it as the width of an
MLP that keeps as much; recomputation is counted with what it gives for other numbers of layers.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron_ext.explain.rank_figures import MemoryUse
from megatron_ext.params import GptShape
from megatron_ext.params.attention_variants import DeltaNet
from megatron_ext.params.layer_parts import LayerPart
from megatron_ext.params.state_space import StateSpace

__all__ = ["activations", "kept_bytes"]

VALUE = 2
"""Bytes of a value; Megatron's formula has them for 16-bit types."""


def activations(asked: argparse.Namespace, shape: GptShape | None, micro_batches: int) -> MemoryUse:
    """Return the activations of the first stage, with the positions of one context-parallel rank.

    Args:
        asked: Megatron's validated arguments.
        shape: of the model; None for one that is neither a GPT nor a hybrid model, of which Megatron's formula is taken
            as it is.
        micro_batches: of a step of one data-parallel rank.
    """
    positions = asked.seq_length // asked.context_parallel_size
    given = argparse.Namespace(**{**vars(asked), "seq_length": positions})
    found = _with_full_recomputation if asked.recompute_granularity == "full" else _megatron
    return MemoryUse(cause="activations", nbytes=round(found(given, shape, micro_batches)), by_formula=True)


def kept_bytes(shape: GptShape, topk: int) -> float:
    """Return the bytes that a layer keeps of a position for its backward, over all tensor-parallel ranks.

    Args:
        shape: of the model.
        topk: experts of a token.

    Returns:
        The mean over the layers of the decoder.
    """
    layers = range(shape.num_layers)
    kept = [_of_part(shape.of_layer(layer), part, topk) for layer in layers for part in shape.parts_of(layer)]
    return sum(kept) / shape.num_layers


def _of_part(shape: GptShape, part: LayerPart, topk: int) -> int:
    # The norm's input, what it makes of it, and the mask of the dropout at the end.
    outside = 5 * shape.hidden_size
    if part == "state_space":
        assert shape.state_space is not None, "a shape with such layers has their sizes"
        return outside + _of_scan(shape.state_space)
    if part == "delta_net":
        assert shape.delta_net is not None, "a shape with such layers has their sizes"
        return outside + _of_scan(shape.delta_net)
    if part in ("attention_linear", "mlp_linear"):
        return outside  # it keeps what it reads, which is what the norm makes
    if part == "mlp":
        return outside + _of_mlp(shape, shape.ffn_hidden_size)
    if part == "experts":
        return outside + _of_experts(shape, topk)
    return outside + _of_attention(shape) + (_of_indexer(shape) if part == "sparse_attention" else 0)


def _of_scan(sizes: StateSpace | DeltaNet) -> int:
    """Return what linear attention or a state space keeps: both convolve, scan and gate what they have projected."""
    return VALUE * (sum(sizes.projected.values()) + sum(sizes.convolved.values()) + 2 * sizes.inner_size)


def _of_attention(shape: GptShape) -> int:
    """Return queries, keys, values and the result; of latent attention with what it projects them up from."""
    latent = shape.latent_attention
    if latent is None:
        return VALUE * 4 * shape.hidden_size
    rotary = latent.qk_pos_emb_head_dim
    # Latents are kept before their norm and after it.
    latents = 2 * ((latent.q_lora_rank or 0) + latent.kv_lora_rank) + rotary
    return VALUE * (latents + shape.num_attention_heads * (2 * (latent.qk_head_dim + rotary) + 2 * latent.v_head_dim))


def _of_indexer(shape: GptShape) -> int:
    sizes = shape.sparse_indexer
    assert sizes is not None, "a shape with such layers has their sizes"
    # Queries and keys are kept before their rotation and after it.
    return VALUE * (2 * (sizes.heads + 1) * sizes.head_dim + sizes.heads)


def _of_mlp(shape: GptShape, width: int) -> int:
    """Return the first product and what the activation makes of it; a gated one has two."""
    return VALUE * (3 if shape.gated_linear_unit else 2) * width


def _of_experts(shape: GptShape, topk: int) -> int:
    # Every one of a token's experts has a copy of it.
    routed = topk * (_of_mlp(shape, shape.expert_ffn_size) + VALUE * shape.expert_width)
    # What is projected up from is kept as well.
    latent = VALUE * (shape.moe_latent_size or 0)
    return routed + latent + _of_mlp(shape, shape.moe_shared_expert_intermediate_size or 0)


def _is_plain(shape: GptShape) -> bool:
    """Whether all layers are of the kind that Megatron's formula knows."""
    layers = {shape.parts_of(layer) for layer in range(shape.num_layers)}
    return layers == {("attention", "mlp")} and shape.latent_attention is None and not shape.layer_blocks


def _megatron(asked: argparse.Namespace, shape: GptShape | None, micro_batches: int, **changed: Any) -> float:
    """Return what Megatron's formula gives."""
    from megatron.training import theoretical_memory_usage as formulas

    given = argparse.Namespace(**{**vars(asked), **changed})
    if shape is None or _is_plain(shape):
        is_selective = asked.sequence_parallel and asked.recompute_granularity == "selective"
        formula = formulas.compute_activation_memory if is_selective else formulas.compute_activation_memory_without_sp
        return float(formula(given, micro_batches))
    width = (kept_bytes(shape, asked.moe_router_topk or 0) - 18 * shape.hidden_size) / 4
    if not asked.sequence_parallel:
        # What is outside of the parts' products is then whole on every rank, of a sum that is divided among them.
        parts = sum(len(shape.parts_of(layer)) for layer in range(shape.num_layers)) / shape.num_layers
        width += parts * 5 * shape.hidden_size * (asked.tensor_model_parallel_size - 1) / 4
    given.ffn_hidden_size = width
    return float(formulas.compute_activation_memory(given, micro_batches))


def _with_full_recomputation(asked: argparse.Namespace, shape: GptShape | None, micro_batches: int) -> float:
    """Return what is kept where layers keep their input alone and are computed again before their backward."""
    layers: int = asked.num_layers
    stages: int = asked.pipeline_model_parallel_size
    chunks = asked.virtual_pipeline_model_parallel_size or 1
    outside = _megatron(asked, shape, micro_batches, num_layers=0)
    of_layers = _megatron(asked, shape, micro_batches) - outside
    one_stage = {"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None}
    alone = [_megatron(asked, shape, micro_batches, num_layers=number, **one_stage) for number in (0, layers)]
    layer: float = (alone[1] - alone[0]) / layers
    in_flight = of_layers / (layer * layers)
    ranks = asked.tensor_model_parallel_size if asked.sequence_parallel else 1
    inputs: float = layers * in_flight * VALUE * asked.seq_length * asked.micro_batch_size * asked.hidden_size / ranks
    number: int = asked.recompute_num_layers or 1
    if asked.recompute_method == "block":
        # The first layers of each chunk of the model are computed again, one at a time.
        again: float = min(1.0, number * stages * chunks / layers)
        return outside + (1 - again) * of_layers + again * inputs + layer
    return outside + inputs / number + number * layer
