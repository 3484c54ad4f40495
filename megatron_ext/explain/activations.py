# SPDX-License-Identifier: Apache-2.0
"""Memory of activations, by Megatron's formula.

Megatron's formula (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", Table 2)
counts 18 h + 4 f bytes for a position and a layer, with h the hidden size and f the width of the MLP. It knows no
mixture of experts, no latent attention and no full recomputation. What a layer of these keeps of a position is given to
it as the width of an MLP that keeps as much; recomputation is counted with what it gives for other numbers of layers.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron_ext.explain.rank_figures import MemoryUse

__all__ = ["activations", "kept_bytes"]

VALUE = 2
"""Bytes of a value; Megatron's formula has them for 16-bit types."""


def activations(asked: argparse.Namespace, micro_batches: int) -> MemoryUse:
    """Return the activations of the first stage, with the positions of one context-parallel rank.

    Args:
        asked: Megatron's validated arguments.
        micro_batches: of a step of one data-parallel rank.
    """
    positions = asked.seq_length // asked.context_parallel_size
    given = argparse.Namespace(**{**vars(asked), "seq_length": positions})
    found = _with_full_recomputation if asked.recompute_granularity == "full" else _megatron
    return MemoryUse(cause="activations", nbytes=round(found(given, micro_batches)), by_formula=True)


def kept_bytes(asked: Any) -> float:
    """Return the bytes that a layer keeps of a position for its backward, over all tensor-parallel ranks."""
    hidden: int = asked.hidden_size
    # The first product and what the activation makes of it; a gated one has two.
    width: int = VALUE * (3 if asked.swiglu else 2)
    dense: int = width * asked.ffn_hidden_size
    # Every one of a token's experts has a copy of it.
    routed: int = (asked.moe_router_topk or 0) * (width * (asked.moe_ffn_hidden_size or 0) + VALUE * hidden)
    mixture: int = routed + width * (asked.moe_shared_expert_intermediate_size or 0)
    experts = _part_with_experts(asked)
    return 18 * hidden + _of_latent_attention(asked) + (1 - experts) * dense + experts * mixture


def _megatron(asked: argparse.Namespace, micro_batches: int, **changed: Any) -> float:
    """Return what Megatron's formula gives."""
    from megatron.training import theoretical_memory_usage as formulas

    given = argparse.Namespace(**{**vars(asked), **changed})
    if not asked.num_experts and not asked.multi_latent_attention:
        is_selective = asked.sequence_parallel and asked.recompute_granularity == "selective"
        formula = formulas.compute_activation_memory if is_selective else formulas.compute_activation_memory_without_sp
        return float(formula(given, micro_batches))
    width = (kept_bytes(asked) - 18 * asked.hidden_size) / 4
    if not asked.sequence_parallel:
        # The 10 h of the norms and dropouts are then whole on every rank, of a sum that is divided among them.
        width += 10 * asked.hidden_size * (asked.tensor_model_parallel_size - 1) / 4
    given.ffn_hidden_size = width
    return float(formulas.compute_activation_memory(given, micro_batches))


def _with_full_recomputation(asked: argparse.Namespace, micro_batches: int) -> float:
    """Return what is kept where layers keep their input alone and are computed again before their backward."""
    layers: int = asked.num_layers
    stages: int = asked.pipeline_model_parallel_size
    chunks = asked.virtual_pipeline_model_parallel_size or 1
    outside = _megatron(asked, micro_batches, num_layers=0)
    of_layers = _megatron(asked, micro_batches) - outside
    one_stage = {"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None}
    alone = [_megatron(asked, micro_batches, num_layers=number, **one_stage) for number in (0, layers)]
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


def _part_with_experts(asked: Any) -> float:
    """Return which part of the layers has experts."""
    if not asked.num_experts:
        return 0.0
    frequency = asked.moe_layer_freq
    if isinstance(frequency, int):
        frequency = [index % frequency == 0 for index in range(asked.num_layers)]
    return sum(map(bool, frequency)) / len(frequency)


def _of_latent_attention(asked: Any) -> float:
    """Return what latent attention keeps beyond queries, keys, values and the result of plain attention."""
    if not asked.multi_latent_attention:
        return 0.0
    heads: int = asked.num_attention_heads
    rotary: int = asked.qk_pos_emb_head_dim
    # Latents are kept before their norm and after it.
    latents = 2 * ((asked.q_lora_rank or 0) + asked.kv_lora_rank) + rotary
    of_heads: int = heads * (2 * (asked.qk_head_dim + rotary) + 2 * asked.v_head_dim)
    plain: int = 4 * asked.hidden_size
    return float(VALUE * (latents + of_heads - plain))
