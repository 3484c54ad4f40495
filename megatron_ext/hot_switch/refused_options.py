# SPDX-License-Identifier: Apache-2.0
"""Options of the model, the data and the layout that training with hot switching refuses.

Those on data parallelism, optimizers and checkpoints are in the support table.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron_ext.seams.arguments import asks_for_cuda_graphs

__all__ = ["refused_config", "refused_options"]


def _is_set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name))


_POSITIONS = ("none", "rope", "learned_absolute")

_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "--transformer-impl inference_optimized",
        lambda args: args.transformer_impl not in ("local", "transformer_engine"),
        "its layers do not train; use transformer_engine or local",
    ),
    (
        "--hot-switch-attention rows with --transformer-impl transformer_engine",
        lambda args: args.hot_switch_attention == "rows" and args.transformer_impl == "transformer_engine",
        "its attention takes no mask between the documents of a row; drop it or use --transformer-impl local",
    ),
    (
        "--fp8-format, --fp4-format or --te-precision-config-file",
        lambda args: args.fp8 is not None or args.fp4 is not None or args.te_precision_config_file is not None,
        "the scales and copies of weights that Transformer Engine keeps would be home's only; use --bf16",
    ),
    (
        "--tp-comm-overlap",
        lambda args: args.tp_comm_overlap,
        "its buffers are made for home's tensor parallel ranks; drop it",
    ),
    (
        "--cpu-offloading-num-layers or --fine-grained-activation-offloading",
        lambda args: args.cpu_offloading_num_layers > 0 or args.fine_grained_activation_offloading,
        "what is offloaded when is remembered for one strategy's micro-batches; drop it",
    ),
    *(
        (f"--{name.replace('_', '-')}", _is_set(name), "it has not been tested with guests; drop it")
        for name in (
            "use_transformer_engine_op_fuser",
            "te_rng_tracker",
            "delay_wgrad_compute",
            "fused_residual_rmsnorm",
            "use_te_activation_func",
            "batch_invariant_mode",
            "distribute_saved_activations",
            "overlap_moe_expert_parallel_comm",
        )
    ),
    (
        "--microbatch-group-size-per-virtual-pipeline-stage",
        lambda args: args.microbatch_group_size_per_vp_stage is not None,
        "a step may have fewer micro-batches than that; drop it: groups are as large as the pipeline has stages",
    ),
    *(
        (f"--{name.replace('_', '-')}", _is_set(name), f"{what} of home's rows only; drop it")
        for name, what in (
            ("log_max_attention_logit", "it would see the logits"),
            ("moe_routing_trace_path", "it would trace the tokens"),
            ("logits_load_dir", "it would compare the logits"),
            ("check_for_spiky_loss", "it would judge all losses by those"),
        )
    ),
    (
        "--cuda-graph-impl, --enable-cuda-graph or --external-cuda-graph",
        asks_for_cuda_graphs,
        "guests' parameters lie elsewhere in every step, and a graph would use them where they were; drop it",
    ),
    (
        "--softmax-type",
        lambda args: args.softmax_type != "vanilla" and args.hot_switch_attention == "documents",
        "attention by document has the ordinary softmax only; use --transformer-impl local with --hot-switch-attention "
        "rows",
    ),
    (
        "--moe-router-load-balancing-type seq_aux_loss or global_aux_loss",
        lambda args: (
            bool({"seq_aux_loss", "global_aux_loss"} & {*_listed(args.moe_router_load_balancing_type)})
            and any(_listed(args.moe_aux_loss_coeff))
        ),
        "the one would take a row of documents for a sequence, the other keeps counts that would be one strategy's "
        "only; use aux_loss",
    ),
    (
        "--moe-expert-capacity-factor",
        lambda args: args.moe_expert_capacity_factor is not None,
        "which tokens are dropped would depend on the strategies; drop it",
    ),
    (
        "--moe-router-load-balancing-type quantile_balancing or sinkhorn",
        lambda args: (
            bool(args.num_experts)
            and bool({"quantile_balancing", "sinkhorn"} & {*_listed(args.moe_router_load_balancing_type)})
        ),
        "home's would follow home's tokens alone; use another type",
    ),
    (
        "--hierarchical-context-parallel-sizes",
        lambda args: bool(args.hierarchical_context_parallel_sizes),
        "all ranks that share a row exchange keys and values at once; drop it",
    ),
    (
        "virtual pipeline stages",
        lambda args: bool(args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank),
        "each strategy has its own; drop --num-layers-per-virtual-pipeline-stage and "
        "--num-virtual-stages-per-pipeline-rank, and give vpp in --hot-switch-strategy-file",
    ),
    (
        "uneven pipeline stages",
        lambda args: bool(
            args.decoder_first_pipeline_num_layers
            or args.decoder_last_pipeline_num_layers
            or args.account_for_embedding_in_pipeline_split
            or args.account_for_loss_in_pipeline_split
            or args.pipeline_model_parallel_layout
        ),
        "each strategy has its own; drop what says so, and give first_stage_layers and last_stage_layers in "
        "--hot-switch-strategy-file",
    ),
    (
        "--local-sgd-sync-in-forward",
        lambda args: getattr(args, "local_sgd_sync_in_forward", False),
        "guests need the synced weights before home's forward pass; drop it",
    ),
    (
        "--dataloader-type",
        lambda args: args.dataloader_type not in (None, "single"),
        "hot switching reads documents in an order of its own; drop it",
    ),
    (
        "a blend of data",
        lambda args: args.data_path is not None and len(args.data_path) != 1,
        "hot switching reads the documents of one corpus; give --data-path one prefix",
    ),
    (
        "data without --data-path (--data-args-path, --per-split-data-args-path or --train-data-path)",
        lambda args: not args.mock_data and args.data_path is None,
        "hot switching reads the documents of one corpus, which --split divides; give --data-path its prefix",
    ),
    ("--sft, --fim-data", lambda args: args.sft or args.fim_data, "hot switching reads plain documents; drop them"),
    (
        "--dataloader-inter-document-masking",
        lambda args: args.dataloader_inter_document_masking,
        "hot switching keeps documents apart itself; drop it",
    ),
    (
        "--window-size",
        lambda args: args.window_size is not None,
        "Megatron's unfused attention forgets the documents' mask with it; drop it",
    ),
    (
        "--position-embedding-type",
        lambda args: args.position_embedding_type not in _POSITIONS,
        f"it has not been tested with packed rows; use one of {', '.join(_POSITIONS)}",
    ),
    (
        "--mla-down-proj-fusion",
        lambda args: args.mla_down_proj_fusion,
        "the parameter view does not know it; drop it",
    ),
    ("--spec", lambda args: args.spec is not None, "the parameter view knows Megatron's own GPT layers only; drop it"),
    (
        "--defer-embedding-wgrad-compute",
        lambda args: args.defer_embedding_wgrad_compute,
        "it has not been tested with guests; drop it",
    ),
)
"""Options that other tables do not cover, whether they are asked for, and why not with hot switching, with the way
out."""

_OF_GPT = ("position_embedding_type",)
_OF_TRANSFORMER = (
    "batch_invariant_mode",
    "cpu_offloading_num_layers",
    "defer_embedding_wgrad_compute",
    "delay_wgrad_compute",
    "distribute_saved_activations",
    "fine_grained_activation_offloading",
    "fp4",
    "fp8",
    "fused_residual_rmsnorm",
    "log_max_attention_logit",
    "moe_aux_loss_coeff",
    "moe_expert_capacity_factor",
    "moe_router_load_balancing_type",
    "overlap_moe_expert_parallel_comm",
    "softmax_type",
    "tp_comm_overlap",
    "use_te_activation_func",
    "use_transformer_engine_op_fuser",
    "window_size",
)
"""Fields of the configs from which Megatron builds a model that have names and meaning of arguments above."""


def refused_options(args: Any) -> list[str]:
    """Return one sentence for each option that is asked for, with its fix.

    Args:
        args: Megatron's arguments as parsed.
    """
    return [f"{option} is not supported with hot switching: {why}" for option, asked, why in _REFUSED if asked(args)]


def refused_config(args: Any, config: Any) -> list[str]:
    """Return one sentence for each option that a script asks for by the model's config alone, with its fix.

    Args:
        args: Megatron's arguments, which do not ask for it.
        config: the `GPTModelConfig` of home, as the script has left it.
    """
    parts = {name: getattr(config, name) for name in _OF_GPT}
    parts |= {name: getattr(config.transformer, name) for name in _OF_TRANSFORMER}
    parts["num_experts"] = config.transformer.num_moe_experts
    merged = SimpleNamespace(**{**vars(args), **parts})
    found = []
    if not config.transformer.calculate_per_token_loss:
        found.append(
            "the model's config says calculate_per_token_loss=False; leave it as --calculate-per-token-loss sets it, "
            "so that the gradients of strategies can be added"
        )
    return found + [
        f"{option}, as the model's config says, is not supported with hot switching: {why}"
        for option, asked, why in _REFUSED
        if asked(merged) and not asked(args)
    ]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
