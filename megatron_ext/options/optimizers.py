# SPDX-License-Identifier: Apache-2.0
"""Rows on optimizers."""

from __future__ import annotations

from typing import Any

from megatron_ext.options.common_verdicts import (
    BACKENDS,
    EXPERTS,
    HOT_BUNDLE,
    HOT_SKIPPED,
    NEEDS_TE,
    ON_GPU_ALONE,
    ON_GPU_ALONE_HOT,
    ON_GPU_ALONE_PEERS,
    PEER_ON_A_GPU,
    PEERS,
    PEERS_BUNDLE,
    STRATEGIES,
    WORKERS,
)
from megatron_ext.options.optimizer_package import FAMILY
from megatron_ext.options.row import Asked, everywhere, is_set, row, says
from megatron_ext.options.verdict import accepted, clash, refused, tested

__all__ = ["OPTIMIZERS"]

_NO_VALUES = refused("the fp32 values that a round moves are not where Megatron's Adam and SGD keep them")
_MUON = f"{WORKERS}test_muon.py::"
_MUON_ROUNDS = tested(f"{_MUON}test_a_resume_in_mid_interval_keeps_the_bits_and_rounds_leave_workers_equal")
_MUON_APART = tested(f"{_MUON}test_a_worker_that_never_meets_another_is_a_stock_job")
_MUON_PEERS = tested(f"{PEERS}test_muon.py::test_peers_end_equal_and_a_killed_one_resumes_with_the_same_bits")
_MUON_HOT = tested(f"{STRATEGIES}test_muon.py::test_hot_equals_static")
_NO_LAYERS_IN_FP32 = refused(
    "Megatron's layer-wise optimizer, which it takes then, cannot train in fp32", "add --bf16, or drop the latter"
)
_NO_STATE_OF_SOAP = refused(
    "Megatron cannot write its state, whose tensors have other shapes than the weights", "use another, or drop --save"
)
_NOT_IN_FP16 = refused("Megatron has no loss scaling for it", "use --bf16, or another optimizer")
_NO_STEP = refused(
    "it lacks in Megatron a scale that emerging-optimizers reads in every step", "use muon, or another optimizer"
)
_SKIPPED = tested(
    f"{WORKERS}test_option_bundles.py::test_skipped_iterations_are_no_steps_and_a_resume_keeps_the_bits"
)
_family = says("optimizer", *FAMILY)
_PREDICTS = tested(f"{BACKENDS}test_cpu_table.py::test_multi_token_prediction")
_STRATEGIES_HAVE_STAGES = accepted("strategies have stages of their own, and are checked one by one")


def _predicts_over_stages(asked: Asked) -> Asked:
    return lambda args: bool(args.mtp_num_layers and args.pipeline_model_parallel_size > 1 and asked(args))


def _layer_wise_without_bf16(args: Any) -> bool:
    is_layer_wise = args.use_distributed_optimizer or args.optimizer == "dist_muon"
    return bool(_family(args) and is_layer_wise and not args.bf16)

_WITH_LEGACY_CHECKPOINTS = refused("Megatron does not combine it with distributed checkpoints", "add the latter")

_CLIPS_IN_HALF_PRECISION = refused(
    "Megatron 0.19 looks for layers where half precision wraps them, and its first step fails", "add --bf16, or drop it"
)
_IN_ITS_OWN_ROW = accepted("what is said of each of them holds")
_CLIPS_IN_EVERY_LAYER = refused("Megatron 0.19 looks for attention in every layer, and fails on those without")
_CLIPS_WHOLE_WEIGHTS = refused("Megatron 0.19 multiplies whole weights, and fails on those that FSDP2 has cut")
_CLIPS_WHOLE_VALUES = refused(
    "Megatron 0.19 clips main values of whole tensors, and fails on those that this optimizer has cut",
    "use --optimizer muon, which has them whole, or drop --use-distributed-optimizer",
)
_CLIPS_WHOLE_HEADS = refused(
    "Megatron 0.19 reckons with the heads of all ranks, and fails on weights that tensor parallelism has cut",
    "use --tensor-model-parallel-size 1, or drop it",
)

OPTIMIZERS = (
    row(
        "--optimizer sgd",
        says("optimizer", "sgd"),
        cpu=tested(f"{BACKENDS}test_cpu_table.py::test_sgd_learns"),
        local_sgd=tested(
            f"{WORKERS}test_rounds.py::test_sgd_with_interval_one_and_no_momentum_is_synchronous_training"
        ),
        hot_switch=tested(f"{STRATEGIES}test_training.py::test_strategies_without_data_in_a_step_change_nothing"),
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--optimizer muon, dist_muon, lion or soap (package emerging-optimizers)",
        says("optimizer", "muon", "dist_muon", "lion", "soap"),
        cpu=_MUON_APART,
        local_sgd=_MUON_ROUNDS,
        hot_switch=_MUON_HOT,
        sync_service=_MUON_PEERS,
        spes=tested(f"{EXPERTS}test_muon.py::test_a_peer_trains_its_own_experts_and_rounds_bring_the_others"),
    ),
    row(
        "--optimizer adaptive_muon",
        says("optimizer", "adaptive_muon"),
        **everywhere(_NO_STEP),
    ),
    row(
        "--optimizer muon and its family with --use-distributed-optimizer, or dist_muon, without --bf16",
        _layer_wise_without_bf16,
        **everywhere(_NO_LAYERS_IN_FP32),
    ),
    row(
        "--optimizer muon and its family with --fp16",
        lambda args: bool(_family(args) and args.fp16),
        **everywhere(_NOT_IN_FP16),
    ),
    row(
        "--optimizer soap with --save",
        lambda args: bool(args.optimizer == "soap" and args.save and not args.no_save_optim),
        **everywhere(_NO_STATE_OF_SOAP),
    ),
    row(
        "--use-precision-aware-optimizer",
        cpu=NEEDS_TE,
        local_sgd=refused("the fp32 values that the outer step works on are inside the fused optimizer"),
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=_NO_VALUES,
    ),
    row(
        "--optimizer-cpu-offload",
        cpu=refused("the optimizer is in the CPU's memory already"),
        local_sgd=refused("the outer step cannot follow the optimizer's copies to the host yet"),
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=_NO_VALUES,
    ),
    row(
        "--optimizer-cuda-graph",
        cpu=refused("there are no CUDA graphs"),
        local_sgd=refused("a captured step would not see what the outer step writes"),
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=refused("a captured step would not see what a round writes"),
    ),
    row(
        "--overlap-param-gather-with-optimizer-step",
        cpu=HOT_BUNDLE,
        local_sgd=refused("parameters would be gathered before the outer step has changed them"),
        hot_switch=HOT_BUNDLE,
        sync_service=refused("parameters would be gathered before a round has changed them"),
    ),
    row(
        "--overlap-param-gather-with-optimizer-step without --ckpt-format torch",
        lambda args: args.overlap_param_gather_with_optimizer_step and args.ckpt_format != "torch",
        **everywhere(_WITH_LEGACY_CHECKPOINTS),
    ),
    row(
        "--reuse-grad-buf-for-mxfp8-param-ag",
        cpu=NEEDS_TE,
        local_sgd=refused("the outer step refreshes parameters while that buffer holds gradients"),
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=refused("a round refreshes parameters while that buffer holds gradients"),
    ),
    row(
        "--fp8-param-gather",
        cpu=NEEDS_TE,
        local_sgd=ON_GPU_ALONE,
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=ON_GPU_ALONE_PEERS,
    ),
    row(
        "--fp4-param-gather",
        cpu=NEEDS_TE,
        local_sgd=ON_GPU_ALONE,
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=ON_GPU_ALONE_PEERS,
    ),
    row(
        "--qk-clip",
        cpu=NEEDS_TE,
        local_sgd=tested(
            f"{WORKERS}test_attention_logits.py::test_a_worker_goes_by_its_own_logits_as_a_stock_job_does"
        ),
        hot_switch=refused(
            "Megatron clips by the logits that home's attention has seen, and guests have attention of their own"
        ),
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--qk-clip or --log-max-attention-logit without --bf16 or --fp16",
        lambda args: (args.qk_clip or args.log_max_attention_logit) and not (args.bf16 or args.fp16),
        cpu=_IN_ITS_OWN_ROW,
        local_sgd=_CLIPS_IN_HALF_PRECISION,
        hot_switch=_CLIPS_IN_HALF_PRECISION,
        sync_service=_CLIPS_IN_HALF_PRECISION,
    ),
    row(
        "--qk-clip or --log-max-attention-logit with --hybrid-layer-pattern",
        lambda args: bool(
            (args.qk_clip or args.log_max_attention_logit)
            and (args.hybrid_layer_pattern or args.hybrid_override_pattern)
        ),
        **everywhere(_CLIPS_IN_EVERY_LAYER),
    ),
    row(
        "--qk-clip with --use-torch-fsdp2",
        lambda args: args.qk_clip and args.use_torch_fsdp2,
        **everywhere(_CLIPS_WHOLE_WEIGHTS),
    ),
    row(
        "--qk-clip with --use-distributed-optimizer, with --optimizer adam or sgd",
        lambda args: args.qk_clip and args.use_distributed_optimizer and not _family(args),
        **everywhere(_CLIPS_WHOLE_VALUES),
    ),
    row(
        "--qk-clip with --tensor-model-parallel-size above 1, without --multi-latent-attention",
        lambda args: args.qk_clip and args.tensor_model_parallel_size > 1 and not args.multi_latent_attention,
        **everywhere(_CLIPS_WHOLE_HEADS),
    ),
    row(
        "--mtp-num-layers",
        cpu=_PREDICTS,
        local_sgd=tested(
            f"{WORKERS}test_multi_token_prediction.py"
            "::test_workers_are_equal_after_a_round_and_a_run_resumes_bit_for_bit"
        ),
        hot_switch=tested(f"{STRATEGIES}test_multi_token_prediction.py::test_hot_equals_static"),
        sync_service=tested(
            f"{PEERS}test_layouts.py"
            "::test_peers_of_all_layouts_in_one_run_equal_peers_of_one_rank_up_to_rounding"
        ),
        spes=tested(
            f"{EXPERTS}test_multi_token_prediction.py"
            "::test_a_peer_trains_its_own_experts_there_and_rounds_bring_the_others"
        ),
        peers_share="mtp_num_layers",
    ),
    *(
        row(
            f"--mtp-num-layers over several stages with {what}",
            _predicts_over_stages(asked),
            flags=("--mtp-num-layers",),
            cpu=on_cpu,
            local_sgd=verdict,
            hot_switch=_STRATEGIES_HAVE_STAGES,
            sync_service=verdict,
        )
        for what, asked, on_cpu, verdict in (
            (
                "tied embeddings",
                lambda args: not args.untie_embeddings_and_output_weights,
                _PREDICTS,
                refused(
                    "Megatron gives the last stage an output layer that nothing uses",
                    "add --untie-embeddings-and-output-weights",
                ),
            ),
            (
                "learned positions",
                says("position_embedding_type", "learned_absolute"),
                refused("Megatron's layers for it take no such positions", "use --position-embedding-type rope"),
                refused(
                    "Megatron gives the last stage positions that stay as they are",
                    "use --position-embedding-type rope",
                ),
            ),
        )
    ),
    row(
        "--freeze-all-layers",
        cpu=refused(
            "Megatron 0.19 trains all weights nevertheless where a script gives it the model's configuration",
            "freeze the weights in the script",
        ),
        local_sgd=refused("there would be nothing to train"),
        hot_switch=refused("there would be nothing to train"),
        sync_service=refused("there would be nothing to train"),
    ),
    row(
        "--iterations-to-skip",
        cpu=tested(f"{BACKENDS}test_cpu_table.py::test_skipped_iterations_train_nothing"),
        local_sgd=_SKIPPED.but(
            "--local-sgd-use-async",
            clash(
                "--local-sgd-use-async is not combined with --iterations-to-skip: its iterations are meetings, between "
                "which workers make numbers of steps that nobody knows before",
                "drop one of them",
            ),
        ),
        hot_switch=HOT_SKIPPED,
        sync_service=refused(
            "a skipped iteration is not a step, so that the peer would lack rounds that others wait for"
        ),
    ),
    row(
        "--result-rejected-tracker-filename",
        is_set("result_rejected_tracker_filename"),
        cpu=_SKIPPED,
        local_sgd=_SKIPPED.but(
            "--local-sgd-use-async",
            refused("Megatron adds what is in that file to --iterations-to-skip, which is refused with rounds by time"),
        ),
        hot_switch=HOT_SKIPPED,
        sync_service=refused("Megatron adds what is in that file to --iterations-to-skip, which is refused"),
    ),
    row(
        "--perform-rl-step",
        cpu=refused("Megatron's inference engine, which makes the samples, runs on GPUs"),
        local_sgd=refused("all ranks, so all workers, wait for the samples that the model makes"),
        hot_switch=refused("hot switching reads documents, and here the model makes the samples"),
        sync_service=refused("samples that the model makes cannot be cut into the peers' parts"),
    ),
)
