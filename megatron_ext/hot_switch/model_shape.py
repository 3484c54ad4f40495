# SPDX-License-Identifier: Apache-2.0
"""The model that Megatron's arguments describe, as far as strategies must divide it."""

from __future__ import annotations

import math
from typing import Any

from megatron_ext.options.asked import heterogeneous_layers
from megatron_ext.params import GptShape, LatentAttention, ParamsError
from megatron_ext.params.attention_variants import delta_net_of
from megatron_ext.params.layer_parts import LayerBlock

__all__ = ["shape_of"]

_SUITS_ALL = math.lcm(*range(1, 1025))
"""Rows of a vocabulary that every tensor parallel size divides: it is padded to suit those there are."""


def shape_of(args: Any) -> GptShape | None:
    """Return the model as far as strategies must divide it, None where Megatron has something to complain about."""
    if not (args.num_layers and args.hidden_size and args.num_attention_heads):
        return None
    width = args.ffn_hidden_size
    if width is None:
        width = int((4 * args.hidden_size * 2 / 3) / 64) * 64 if args.swiglu else 4 * args.hidden_size
    try:
        return GptShape(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            ffn_hidden_size=width,
            num_attention_heads=args.num_attention_heads,
            num_query_groups=args.num_query_groups if args.group_query_attention else None,
            kv_channels=args.kv_channels,
            padded_vocab_size=_SUITS_ALL,
            gated_linear_unit=args.swiglu,
            latent_attention=_latent_attention(args) if args.multi_latent_attention else None,
            num_moe_experts=args.num_experts,
            moe_ffn_hidden_size=args.moe_ffn_hidden_size,
            moe_shared_expert_intermediate_size=args.moe_shared_expert_intermediate_size,
            mtp_num_layers=args.mtp_num_layers or 0,
            layer_blocks=_layer_blocks(args),
            delta_net=delta_net_of(args),
            max_sequence_length=_learned_positions(args),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        )
    except ParamsError:
        return None


def _learned_positions(args: Any) -> int:
    """Return how many positions the model learns; Megatron complains itself where it cannot be made."""
    learns = args.position_embedding_type == "learned_absolute"
    return int(args.max_position_embeddings or 0) if learns else 0


def _layer_blocks(args: Any) -> tuple[LayerBlock, ...]:
    """Return the layers of a heterogeneous model, none of any other.

    Raises:
        ParamsError: the file does not describe them.
    """
    blocks = heterogeneous_layers(args)
    if not blocks:
        return ()
    from megatron.core.transformer.heterogeneous.heterogeneous_config import AttentionConfig, MLPConfig

    try:
        return tuple(
            LayerBlock.of(
                AttentionConfig.build_config_from_dict(block, args.num_attention_heads),
                MLPConfig.build_config_from_dict(block, args.hidden_size),
            )
            for block in blocks
        )
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ParamsError(f"{args.heterogeneous_layers_config_path}: {error}") from error


def _latent_attention(args: Any) -> LatentAttention:
    return LatentAttention(
        kv_lora_rank=args.kv_lora_rank,
        q_lora_rank=args.q_lora_rank,
        qk_head_dim=args.qk_head_dim,
        qk_pos_emb_head_dim=args.qk_pos_emb_head_dim,
        v_head_dim=args.v_head_dim,
    )
