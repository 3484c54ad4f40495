# SPDX-License-Identifier: Apache-2.0
"""Rows on what the layers of a model compute, whatever computes it."""

from __future__ import annotations

from typing import Any

from megatron_ext.options.asked import asks_to_switch, attention_variant, builds_from_config
from megatron_ext.options.common_verdicts import (
    BUNDLE,
    CURRENT_LAYERS,
    EXPERTS,
    HOT_BUNDLE,
    IGNORED,
    NO_TE_ON_CPU,
    ON_A_GPU,
    ON_GPU_ALONE_HOT,
    PEER_ON_A_GPU,
    PEERS,
    PEERS_BUNDLE,
    PEERS_CURRENT_LAYERS,
    STRATEGIES,
    UNKNOWN_TENSORS,
    WORKERS,
)
from megatron_ext.options.row import differs, everywhere, given, is_set, row
from megatron_ext.options.verdict import accepted, needs_gpu, refused, tested

__all__ = ["LAYER_FUNCTION"]


def _forgets_the_norm(args: Any) -> bool:
    dense = args.num_experts is None and args.spec is None
    return bool(args.qk_l2_norm and dense and args.transformer_impl == "local" and builds_from_config())


_HYBRID_WORKERS = tested(
    f"{WORKERS}test_hybrid_models.py::test_workers_are_equal_after_a_round_and_a_run_resumes_bit_for_bit"
)
_HYBRID_PEERS = tested(
    f"{PEERS}test_hybrid_peers.py::test_peers_of_all_layouts_in_one_run_equal_peers_of_one_rank_up_to_rounding"
)
_HYBRID_EXPERTS = tested(f"{EXPERTS}test_hybrid_models.py::test_a_peer_trains_its_own_experts_and_all_other_layers")
_NO_PLACE = refused("Megatron 0.19 hands it to a model's configuration, which has no place for it")
_HYBRIDS_NEED_A_GPU = needs_gpu("its layers are Transformer Engine's and mamba_ssm's, which are CUDA kernels")
_NO_HYBRIDS = refused("strategies cut a GPT's layers into stages, and a pattern says itself where they are")
_FORMER_MTP = refused(
    "Megatron 0.19 keeps it for old checkpoints, and fails on it in models without state-space layers",
    "write the pattern into --hybrid-layer-pattern, as M*-M/MM",
)
_OF_HYBRIDS = accepted("it says nothing without --hybrid-layer-pattern")

_ORDINARY_SOFTMAX = refused(
    "attention by document has the ordinary softmax only",
    "use --transformer-impl local with --hot-switch-attention rows",
)
_EVERY_VARIANT = accepted("the row on --experimental-attention-variant has the say")
_SWITCHED_DELTA_NET = tested(f"{STRATEGIES}test_delta_net.py::test_hot_equals_static")
_REDUCES_WITH_SP_ALONE = refused(
    "Megatron 0.19 all-reduces the gradients of its norms over tensor-parallel ranks only with sequence parallelism, "
    "and without it these weights drift apart",
    "add --sequence-parallel",
)
_LACKS_AN_INDEXER = refused(
    "Megatron 0.19 leaves layers without an indexer then, for which it fails where it saves a checkpoint"
)
_CARRIED_ON = refused(
    "its layers carry their state from a document into the next one of a packed row",
    "use --hot-switch-attention padded, which is the default with it",
)
_PREDICTS_OTHERWISE = refused(
    "Megatron 0.19 makes the layers that predict further tokens of another kind, or fails where it builds them"
)

_OF_VARIANTS = {
    "gated_delta_net": ("linear_num_key_heads", "linear_key_head_dim"),
    "dsa": (
        "dsa_indexer_rope_interleaved",
        "dsa_indexer_rotate_activation",
        "dsa_indexer_scoring_relu",
        "dsa_indexer_k_norm_epsilon",
        "dsa_indexer_k_norm_fp32",
    ),
}
"""What changes the function of a variant of attention and not the shapes of its tensors; a release has it or not."""


def _pattern(args: Any) -> str:
    """Return a hybrid model's pattern, empty for a GPT."""
    return args.hybrid_layer_pattern or args.hybrid_override_pattern or ""


def _attention_variants(args: Any) -> str | None:
    """Return the variants that the model has, with what else all peers must have in common of them."""
    asked = [attention_variant(args)]
    asked += [variant for letter, variant in (("D", "dsa"), ("G", "gated_delta_net")) if letter in _pattern(args)]
    said = []
    for variant in dict.fromkeys(filter(None, asked)):
        said += [variant, *(f"{name}={getattr(args, name, None)}" for name in _OF_VARIANTS.get(variant, ()))]
    return " ".join(said) or None


LAYER_FUNCTION = (
    row(
        "--num-attention-heads",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="num_attention_heads",
    ),
    row(
        "--num-query-groups",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        # A checkpoint's arguments (--use-checkpoint-args) have the number of heads where there are no groups.
        peers_share=lambda args: args.num_query_groups if args.group_query_attention else 1,
    ),
    row(
        "--attention-output-gate",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="attention_output_gate",
    ),
    row(
        "--qk-layernorm",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="qk_layernorm",
    ),
    row(
        "--qk-l2-norm",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="qk_l2_norm",
    ),
    row(
        "--qk-l2-norm with --transformer-impl local, without experts",
        _forgets_the_norm,
        **everywhere(IGNORED),
    ),
    row(
        "--dsa-indexer-topk",
        cpu=NO_TE_ON_CPU,
        hot_switch=ON_GPU_ALONE_HOT,
        peers_share="dsa_indexer_topk",
        local_sgd=CURRENT_LAYERS,
        sync_service=PEERS_CURRENT_LAYERS,
    ),
    row(
        "--experimental-attention-variant with --mtp-num-layers",
        lambda args: bool(args.experimental_attention_variant and args.mtp_num_layers),
        cpu=NO_TE_ON_CPU,
        local_sgd=_PREDICTS_OTHERWISE,
        hot_switch=_PREDICTS_OTHERWISE,
        sync_service=_PREDICTS_OTHERWISE,
    ),
    row(
        "--dsa-indexer-topk-freq above 1",
        lambda args: args.dsa_indexer_topk_freq > 1,
        variables=("dsa_indexer_topk_freq",),
        cpu=NO_TE_ON_CPU,
        local_sgd=_LACKS_AN_INDEXER,
        hot_switch=_LACKS_AN_INDEXER,
        sync_service=_LACKS_AN_INDEXER,
    ),
    row(
        "--normalization",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="normalization",
    ),
    row(
        "--norm-epsilon",
        is_set("layernorm_epsilon"),
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="layernorm_epsilon",
    ),
    row(
        "--apply-residual-connection-post-layernorm",
        lambda args: bool(args.apply_residual_connection_post_layernorm and builds_from_config()),
        **everywhere(IGNORED),
        peers_share="apply_residual_connection_post_layernorm",
    ),
    row(
        "--swiglu",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="swiglu",
    ),
    row(
        "--squared-relu",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="squared_relu",
    ),
    row(
        "--openai-gelu",
        lambda args: bool(args.openai_gelu and builds_from_config()),
        **everywhere(IGNORED),
        peers_share="openai_gelu",
    ),
    row(
        "--quick-geglu",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="quick_geglu",
    ),
    row(
        "--glu-linear-offset",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="glu_linear_offset",
    ),
    row(
        "--activation-func-clamp-value",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="activation_func_clamp_value",
    ),
    row(
        "--use-mup",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="use_mup",
    ),
    row(
        "--mup-width-mult",
        differs("mup_width_mult", 1.0),
        variables=("mup_width_mult",),
        **everywhere(IGNORED),
        peers_share="mup_width_mult",
    ),
    row(
        "--mup-base-hidden-size",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="mup_base_hidden_size",
    ),
    row(
        "--mup-embedding-mult",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="mup_embedding_mult",
    ),
    row(
        "--mup-output-mult",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="mup_output_mult",
    ),
    row(
        "--mup-base-head-dim",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="mup_base_head_dim",
    ),
    row(
        "--mup-attn-scale-power",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        peers_share="mup_attn_scale_power",
    ),
    row(
        "--experimental-attention-variant",
        given("experimental_attention_variant"),
        cpu=NO_TE_ON_CPU,
        local_sgd=CURRENT_LAYERS,
        hot_switch=accepted("each variant has a row of its own"),
        sync_service=PEERS_CURRENT_LAYERS,
        peers_share=_attention_variants,
    ),
    row(
        "--experimental-attention-variant gated_delta_net",
        lambda args: attention_variant(args) == "gated_delta_net",
        cpu=_EVERY_VARIANT,
        local_sgd=_EVERY_VARIANT,
        sync_service=_EVERY_VARIANT,
        hot_switch=_SWITCHED_DELTA_NET.but("--hot-switch-attention documents", _CARRIED_ON).but(
            "--hot-switch-attention rows", _CARRIED_ON
        ),
    ),
    row(
        "Gated DeltaNet (--experimental-attention-variant gated_delta_net, or G in --hybrid-layer-pattern) with tensor "
        "parallelism and without --sequence-parallel",
        lambda args: (
            "gated_delta_net" in (_attention_variants(args) or "").split()
            and args.tensor_model_parallel_size > 1
            and not args.sequence_parallel
            and not asks_to_switch(args)  # which checks each strategy
        ),
        flags=("--experimental-attention-variant", "--hybrid-layer-pattern"),
        **everywhere(_REDUCES_WITH_SP_ALONE),
    ),
    row(
        "--experimental-attention-variant other than gated_delta_net",
        lambda args: attention_variant(args) not in (None, "gated_delta_net"),
        cpu=_EVERY_VARIANT,
        hot_switch=refused(
            "sparse attention's indexer has a loss of its own over all positions, and strategies have different padding"
        ),
        local_sgd=_EVERY_VARIANT,
        sync_service=_EVERY_VARIANT,
    ),
    row(
        "--apply-layernorm-1p",
        is_set("layernorm_zero_centered_gamma"),
        cpu=needs_gpu("torch's LayerNorm has no zero-centred weight"),
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
        peers_share="layernorm_zero_centered_gamma",
    ),
    row(
        "--softmax-type",
        differs("softmax_type", "vanilla"),
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE.but(
            "--hot-switch-attention documents", _ORDINARY_SOFTMAX
        ).but("--hot-switch-attention padded", _ORDINARY_SOFTMAX),
        sync_service=PEERS_BUNDLE,
        peers_share="softmax_type",
        in_config=("transformer.softmax_type",),
    ),
    row(
        "--mla-down-proj-fusion",
        cpu=NO_TE_ON_CPU,
        local_sgd=UNKNOWN_TENSORS,
        hot_switch=UNKNOWN_TENSORS,
        sync_service=UNKNOWN_TENSORS,
    ),
    row(
        "--spec",
        given("spec"),
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=refused("the parameter view knows Megatron's own GPT layers only"),
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--init-method-xavier-uniform",
        lambda args: bool(args.init_method_xavier_uniform and builds_from_config()),
        **everywhere(_NO_PLACE),
    ),
    row(
        "--hybrid-override-pattern",  # the former name, which Megatron takes over when it validates
        cpu=_HYBRIDS_NEED_A_GPU,
        local_sgd=_HYBRID_WORKERS,
        hot_switch=_NO_HYBRIDS,
        sync_service=_HYBRID_PEERS,
        spes=_HYBRID_EXPERTS,
    ),
    row(
        "--mtp-hybrid-override-pattern",  # the former way to say what --hybrid-layer-pattern has behind a slash
        cpu=_HYBRIDS_NEED_A_GPU,
        local_sgd=_FORMER_MTP,
        hot_switch=_NO_HYBRIDS,
        sync_service=_FORMER_MTP,
    ),
    row(
        "--hybrid-layer-pattern",
        cpu=_HYBRIDS_NEED_A_GPU,
        local_sgd=_HYBRID_WORKERS,
        hot_switch=_NO_HYBRIDS,
        sync_service=_HYBRID_PEERS,
        spes=_HYBRID_EXPERTS,
        # Bars are where a peer has cut its own pipeline.
        peers_share=lambda args: _pattern(args).replace("|", ""),
    ),
    *(
        row(
            f"--mamba-{size}",
            given(field),
            cpu=_OF_HYBRIDS,
            local_sgd=_HYBRID_WORKERS,
            hot_switch=_OF_HYBRIDS,
            sync_service=_HYBRID_PEERS,
            spes=_HYBRID_EXPERTS,
            peers_share=field,
        )
        for size, field in (
            ("state-dim", "mamba_state_dim"),
            ("head-dim", "mamba_head_dim"),
            ("num-groups", "mamba_num_groups"),
            ("num-heads", "mamba_num_heads"),
        )
    ),
)
