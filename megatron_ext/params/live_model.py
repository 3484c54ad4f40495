# SPDX-License-Identifier: Apache-2.0
"""Build the parameter view from a live GPT or hybrid model of Megatron's. The only module here that knows those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.utils import unwrap_model

from megatron_ext.options.asked import attention_variant
from megatron_ext.params.attention_variants import delta_net_of, sparse_indexer_of
from megatron_ext.params.checks import check_chunk
from megatron_ext.params.gpt_shape import GptShape, LatentAttention
from megatron_ext.params.hybrid_pattern import kinds_of_pattern, stages_of_pattern
from megatron_ext.params.layer_parts import LayerBlock
from megatron_ext.params.layout import DEFAULT_ORDER, Coordinates, Layout, uneven_layers
from megatron_ext.params.placement import Placement
from megatron_ext.params.state_space import StateSpace
from megatron_ext.params.tensors import ParamsError
from megatron_ext.params.view import LocalParameter, ParameterView, match_chunk

UNSUPPORTED_OPTIONS = {
    "mla_down_proj_fusion": "multi-latent attention with fused down projections",
    "moe_single_grouped_weight": "one weight for all experts of a rank",
    "moe_single_grouped_bias": "one bias for all experts of a rank",
    "use_kitchen": "Kitchen linear layers",
}
"""``TransformerConfig`` fields that change which tensors exist or how they are cut, with their meaning."""


def build_view(
    model_chunks: Sequence[torch.nn.Module], *, vocab_size: int | None = None, pg_collection: Any = None
) -> ParameterView:
    """See ``ParameterView.from_model``."""
    chunks = [unwrap_model(chunk) for chunk in model_chunks]
    _refuse_unsupported(chunks)
    groups = chunks[0].pg_collection if pg_collection is None else pg_collection
    layout = layout_of(chunks[0], groups, len(chunks))
    shape = shape_of(chunks[0], vocab_size)
    if shape.delta_net is not None and layout.tp > 1 and not chunks[0].config.sequence_parallel:
        raise ParamsError(
            "Gated DeltaNet with tensor parallelism needs sequence parallelism: without it Megatron does not "
            "all-reduce the gradients of its norms, whose copies drift apart; add --sequence-parallel"
        )
    placement = Placement(shape, layout)
    place = coordinates_of(groups)
    entries: list[LocalParameter] = []
    buffers: list[LocalParameter] = []
    for index, chunk in enumerate(chunks):
        parameters = list(chunk.named_parameters())
        found, found_buffers = match_chunk(placement, place, index, parameters, _persistent_buffers(chunk))
        check_chunk(chunk, placement, (*found, *found_buffers), groups)
        entries += found
        buffers += found_buffers
    return ParameterView(placement, place, entries, buffers)


def has_shape(model: Any) -> bool:
    """Whether a model, unwrapped, is of a kind that ``shape_of`` knows."""
    return isinstance(model, GPTModel | HybridModel)


def shape_of(model: Any, vocab_size: int | None = None) -> GptShape:
    """The shape of a ``GPTModel`` or ``HybridModel``, read from its config and its pattern of layers.

    Args:
        model: any chunk of the model, unwrapped.
        vocab_size: rows of the vocabulary without padding, None when unknown.
    """
    config = model.config
    learned_positions = model.position_embedding_type == "learned_absolute"
    balancing = config.moe_router_load_balancing_type
    kinds, predicting = kinds_of_pattern(model.hybrid_layer_pattern) if isinstance(model, HybridModel) else ((), ())
    return GptShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        padded_vocab_size=model.vocab_size,
        vocab_size=vocab_size,
        max_sequence_length=model.max_sequence_length if learned_positions else 0,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        gated_linear_unit=config.gated_linear_unit,
        add_bias_linear=config.add_bias_linear,
        add_qkv_bias=config.add_qkv_bias,
        attention_output_gate=config.attention_output_gate,
        learnable_softmax=config.softmax_type == "learnable",
        qk_layernorm=config.qk_layernorm,
        qk_norm_over_heads=getattr(config, "qk_norm_over_heads", False),  # by megatron_ext.layer_specs
        latent_attention=_latent_attention(config) if config.multi_latent_attention else None,
        delta_net=delta_net_of(config, kinds + predicting),
        sparse_indexer=sparse_indexer_of(config),
        normalization=config.normalization,
        num_moe_experts=config.num_moe_experts,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size,
        moe_latent_size=config.moe_latent_size,
        moe_layers=tuple(kind == "experts" for kind in kinds) or _moe_layers(config),
        layer_kinds=kinds,
        mtp_layer_kinds=predicting,
        layer_blocks=_layer_blocks(config) if config.heterogeneous_block_specs else (),
        state_space=_state_space(config) if "state_space" in kinds + predicting else None,
        mtp_num_layers=_prediction_layers(config),
        moe_shared_expert_intermediate_size=config.moe_shared_expert_intermediate_size,
        moe_shared_expert_gate=config.moe_shared_expert_gate,
        moe_router_enable_expert_bias=config.moe_router_enable_expert_bias,
        moe_router_quantile_balancing=balancing == "quantile_balancing",
        dtype=config.params_dtype,
    )


def _layer_blocks(config: Any) -> tuple[LayerBlock, ...]:
    """The layers of a heterogeneous model."""
    return tuple(LayerBlock.of(block.attention, block.mlp) for block in config.per_block_parameters)


def _latent_attention(config: Any) -> LatentAttention:
    return LatentAttention(
        kv_lora_rank=config.kv_lora_rank,
        q_lora_rank=config.q_lora_rank,
        qk_head_dim=config.qk_head_dim,
        qk_pos_emb_head_dim=config.qk_pos_emb_head_dim,
        v_head_dim=config.v_head_dim,
        cut_down_projections=config.transformer_impl == "local",
    )


def _state_space(config: Any) -> StateSpace:
    return StateSpace(
        # Megatron's layers are twice as wide as the model unless they are told.
        heads=config.mamba_num_heads or 2 * config.hidden_size // config.mamba_head_dim,
        head_dim=config.mamba_head_dim,
        groups=config.mamba_num_groups,
        state_dim=config.mamba_state_dim,
    )


def layout_of(model: Any, groups: Any, chunks: int) -> Layout:
    """The layout of a running job.

    Args:
        model: any chunk of the model, unwrapped.
        groups: the ``ProcessGroupCollection``; its data parallel groups may be a worker's own.
        chunks: model chunks per rank.
    """
    pp = groups.pp.size()
    return Layout(
        tp=groups.tp.size(),
        pp=pp,
        vpp=chunks,
        ep=groups.ep.size(),
        etp=groups.expt_tp.size(),
        dp=groups.dp.size(),
        cp=groups.cp.size(),
        order=_order_of(groups),
        layers_per_chunk=_layers_per_chunk(model, pp, chunks),
        prediction_chunk=_prediction_chunk(model.config, pp, chunks),
    )


def coordinates_of(groups: Any) -> Coordinates:
    """This rank's place, read from the ranks of its process groups."""
    return Coordinates(
        tp=groups.tp.rank(),
        pp=groups.pp.rank(),
        cp=groups.cp.rank(),
        dp=groups.dp.rank(),
        ep=groups.ep.rank(),
        etp=groups.expt_tp.rank(),
        edp=groups.expt_dp.rank(),
    )


def _order_of(groups: Any) -> str:
    """The rank order: stages after data parallel ranks, or before them (``--use-tp-pp-dp-mapping``)."""
    stages = torch.distributed.get_process_group_ranks(groups.pp)
    neighbours = len(stages) > 1 and stages[1] - stages[0] == groups.tp.size() * groups.cp.size()
    return "tp-cp-ep-pp-dp" if neighbours and groups.dp.size() > 1 else DEFAULT_ORDER


def _layers_per_chunk(model: Any, pp: int, vpp: int) -> tuple[int, ...]:
    config = model.config
    if isinstance(model, HybridModel) and pp > 1 and len(segments := stages_of_pattern(model.hybrid_layer_pattern)) > 1:
        return tuple(map(len, segments))
    stages = config.pipeline_model_parallel_layout
    if stages is not None:
        return tuple(kinds.count("decoder") for kinds in _listed_kinds(stages, pp, vpp))
    return uneven_layers(
        config.num_layers,
        pp=pp,
        vpp=vpp,
        first=config.num_layers_in_first_pipeline_stage,
        last=config.num_layers_in_last_pipeline_stage,
        embedding_counts=config.account_for_embedding_in_pipeline_split,
        loss_counts=config.account_for_loss_in_pipeline_split,
    )


def _prediction_chunk(config: Any, pp: int, vpp: int) -> int | None:
    """The chunk with the layers of multi-token prediction where stages are listed: Megatron lets it be any but the
    first.
    """
    stages = config.pipeline_model_parallel_layout
    if stages is None or not config.mtp_num_layers:
        return None
    return next((place for place, kinds in enumerate(_listed_kinds(stages, pp, vpp)) if "mtp" in kinds), None)


def _listed_kinds(stages: Any, pp: int, vpp: int) -> list[list[str]]:
    """The kinds of the layers of each chunk, in the model's order, where stages are listed."""
    return [[kind.name for kind in stages.layout[stage][chunk]] for chunk in range(vpp) for stage in range(pp)]


def _moe_layers(config: Any) -> tuple[bool, ...]:
    if not config.num_moe_experts:
        return ()
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(config.num_layers))
    return tuple(bool(flag) for flag in frequency)


def _prediction_layers(config: Any) -> int:
    """Layers of multi-token prediction that have weights: one may be repeated."""
    number = config.mtp_num_layers or 0
    return min(number, 1) if config.mtp_use_repeated_layer else number


def _persistent_buffers(chunk: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    persistent = chunk.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in chunk.named_buffers() if name in persistent]


def _refuse_unsupported(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        if not has_shape(chunk):
            raise ParamsError(
                f"the model is a {type(chunk).__name__}; the global parameter view knows GPTModel and HybridModel only"
            )
    config = chunks[0].config
    used = [
        f"{field} ({meaning})"
        for field, meaning in UNSUPPORTED_OPTIONS.items()
        if getattr(config, field, None)
    ]
    variant = attention_variant(config)
    if variant not in (None, "gated_delta_net", "dsa"):
        used.append(f"experimental_attention_variant ({variant})")
    if getattr(config, "dsa_indexer_topk_freq", 1) > 1:
        used.append("dsa_indexer_topk_freq (keys that layers choose for others)")
    if getattr(config, "gtp_weight_remat_size", 1) > 1:
        used.append("gtp_weight_remat_size (generalised tensor parallelism)")
    if used:
        raise ParamsError("the global parameter view does not know models with " + ", ".join(used))
