# SPDX-License-Identifier: Apache-2.0
"""How `pretrain_gpt.py` builds its model on Megatron 0.18, which has no configuration that builds one by itself."""

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args


def build_gpt(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build one model chunk, dense or MoE.

    Args:
        pre_process: whether it holds the embedding.
        post_process: whether it holds the output layer.
        vp_stage: its virtual pipeline stage.
        config: its `TransformerConfig`; made of the arguments unless given.
        pg_collection: its process groups.
    """
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    kind = {
        "use_transformer_engine": args.transformer_impl == "transformer_engine",
        "normalization": args.normalization,
        "qk_l2_norm": args.qk_l2_norm,
        "vp_stage": vp_stage,
    }
    predictors = None
    if args.mtp_num_layers:
        # A stage may have predictors alone, without a layer of the decoder to make them like.
        last_layer = get_gpt_decoder_layer_specs(config, **kind)[-1]
        predictors = get_gpt_mtp_block_spec(
            config, last_layer, use_transformer_engine=kind["use_transformer_engine"], vp_stage=vp_stage
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, **kind),
        mtp_block_spec=predictors,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
