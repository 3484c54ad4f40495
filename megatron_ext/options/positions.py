# SPDX-License-Identifier: Apache-2.0
"""Rows on positions, masks and what counts in the loss: what a model computes of a row of tokens."""

from __future__ import annotations

from megatron_ext.options.asked import builds_from_config
from megatron_ext.options.common_verdicts import (
    BUNDLE,
    HOT_BUNDLE,
    IGNORED,
    NO_TE_ON_CPU,
    ON_A_GPU,
    OWN_SCRIPT,
    PEER_ON_A_GPU,
    PEERS_BUNDLE,
    STRATEGIES,
)
from megatron_ext.options.row import everywhere, given, row, says
from megatron_ext.options.verdict import clash, refused, tested

__all__ = ["POSITIONS"]

_OTHER_POSITIONS = "use one of none, rope, yarn, learned_absolute"

_NO_RELATIVE = refused("Megatron's GPT has none", _OTHER_POSITIONS)

POSITIONS = (
    row(
        "--window-attn-skip-freq",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="window_attn_skip_freq",
    ),
    row(
        "--rotary-base",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="rotary_base",
    ),
    row(
        "--rotary-percent",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="rotary_percent",
    ),
    row(
        "--rotary-interleaved",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="rotary_interleaved",
    ),
    row(
        "--rotary-seq-len-interpolation-factor",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="rotary_seq_len_interpolation_factor",
    ),
    row(
        "--use-rope-scaling",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="use_rope_scaling",
    ),
    row(
        "--rope-scaling-factor",
        lambda args: bool(args.rope_scaling_factor != 8.0 and builds_from_config()),
        variables=("rope_scaling_factor",),
        **everywhere(IGNORED),
        peers_share="rope_scaling_factor",
    ),
    row(
        "--no-rope-freq",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="no_rope_freq",
    ),
    row(
        "--rope-type",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="rope_type",
    ),
    row(
        "--rotary-scaling-factor",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="rotary_scaling_factor",
    ),
    row(
        "--yarn-original-max-position-embeddings",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="yarn_original_max_position_embeddings",
    ),
    row(
        "--yarn-beta-fast",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="yarn_beta_fast",
    ),
    row(
        "--yarn-beta-slow",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="yarn_beta_slow",
    ),
    row(
        "--yarn-correction-range-round-to-int",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="yarn_correction_range_round_to_int",
    ),
    row(
        "--mscale",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="mscale",
    ),
    row(
        "--mscale-all-dim",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="mscale_all_dim",
    ),
    row(
        "--reset-position-ids",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="reset_position_ids",
    ),
    row(
        "--reset-attention-mask",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="reset_attention_mask",
    ),
    row(
        "--eod-mask-loss",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="eod_mask_loss",
    ),
    row(
        "--window-size",
        given("window_size"),
        cpu=HOT_BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=tested(f"{STRATEGIES}test_windows.py::test_strategies_attend_within_windows_of_documents").but(
            "--hot-switch-attention rows",
            clash(
                "--hot-switch-attention rows is not combined with --window-size, with which Megatron's unfused "
                "attention forgets the mask between the documents of a row",
                "drop the former",
            ),
        ),
        sync_service=PEERS_BUNDLE,
        peers_share="window_size",
        in_config=("transformer.window_size",),
    ),
    row(
        "--window-size with --transformer-impl transformer_engine",
        lambda args: args.window_size is not None and args.transformer_impl == "transformer_engine",
        cpu=NO_TE_ON_CPU,
        local_sgd=ON_A_GPU,
        hot_switch=refused(
            "only a GPU can show its attention to windows of documents", "use --transformer-impl local, or drop it"
        ),
        sync_service=PEER_ON_A_GPU,
        in_config=("transformer.window_size",),
    ),
    row(
        "--window-size other than N,0",
        lambda args: args.window_size is not None and not (args.window_size[0] >= 0 == args.window_size[1]),
        cpu=refused(
            "Megatron's unfused attention lets positions see what they are to predict", "give --window-size N,0"
        ),
        local_sgd=ON_A_GPU,
        hot_switch=refused(
            "a position attends to itself and to N before it, and to none that follow", "give --window-size N,0"
        ),
        sync_service=PEER_ON_A_GPU,
        in_config=("transformer.window_size",),
    ),
    row(
        "--position-embedding-type yarn",
        says("position_embedding_type", "yarn"),
        cpu=HOT_BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=tested(f"{STRATEGIES}test_windows.py::test_strategies_keep_yarns_positions"),
        sync_service=PEERS_BUNDLE,
        in_config=("position_embedding_type",),
    ),
    row(
        "--position-embedding-type mrope",
        says("position_embedding_type", "mrope"),
        cpu=OWN_SCRIPT,
        local_sgd=OWN_SCRIPT,
        hot_switch=refused("it takes three positions of each token, and packed rows have one", _OTHER_POSITIONS),
        sync_service=OWN_SCRIPT,
        in_config=("position_embedding_type",),
    ),
    row(
        "--position-embedding-type relative",
        says("position_embedding_type", "relative"),
        **everywhere(_NO_RELATIVE),
        in_config=("position_embedding_type",),
    ),
    row(
        "--position-embedding-type",
        given("position_embedding_type"),
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="position_embedding_type",
    ),
)
