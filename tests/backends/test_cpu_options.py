# SPDX-License-Identifier: Apache-2.0
"""Megatron's options on CPU: defaults that let a plain command run, and refusals by name."""

import pytest

from tests.support.distributed import run_ranks
from tests.support.presets import MOE, toy_gpt
from tests.support.pretrain import run_failing_pretrain, run_pretrain

# Every row of the table of options that needs a GPU, by flags that ask for it.
REFUSED = [
    "--context-parallel-size 2",
    "--distributed-backend nccl",
    "--pipeline-model-parallel-comm-backend ucc",
    "--use-ring-exchange-p2p",
    "--tp-comm-overlap",
    "--transformer-impl transformer_engine",
    "--transformer-impl inference_optimized",
    "--attention-backend flash",
    "--attention-backend fused",
    "--use-flash-attn",
    "--experimental-attention-variant gated_delta_net",
    "--apply-layernorm-1p",
    "--fp32-residual-connection --bf16",
    "--use-te-activation-func",
    "--use-transformer-engine-op-fuser",
    "--fused-residual-rmsnorm",
    "--use-kitchen-attention",
    "--batch-invariant-mode",
    "--delay-wgrad-compute",
    "--defer-embedding-wgrad-compute",
    "--fp8-format hybrid",
    "--fp4-format e2m1",
    "--moe-grouped-gemm",
    "--moe-latent-size 16",
    "--moe-single-grouped-weight",
    "--moe-single-grouped-bias",
    "--moe-permute-fusion",
    "--moe-router-fusion",
    "--moe-token-dispatcher-type flex",
    "--moe-enable-deepep",
    "--cuda-graph-impl local",
    "--cpu-offloading-num-layers 1",
    "--fine-grained-activation-offloading",
    "--recompute-modules layernorm",
    "--recompute-modules mlp",
    "--recompute-modules moe",
    "--profile",
    "--record-memory-history",
    "--log-energy",
    "--log-max-attention-logit",
    "--gpu-sniff-test-interval 1",
    "--save-activations-interval 1 --save folder --save-interval 1",
    "--save-dgrads-interval 1 --bf16 --save folder --save-interval 1",
    "--save-tokens-per-expert-interval 1 --save folder --save-interval 1",
    "--sft",
    "--hierarchical-context-parallel-sizes 2 2",
    "--te-precision-config-file file",
    "--te-rng-tracker",
    "--dsa-indexer-topk 4",
    "--dsa-indexer-topk-freq 2",
    "--mla-down-proj-fusion",
    "--hybrid-override-pattern M*",
    "--mtp-hybrid-override-pattern M*",
    "--hybrid-layer-pattern M*",
    "--moe-expert-rank-capacity-factor 1.0",
    "--moe-mlp-glu-interleave-size 8",
    "--moe-shared-expert-glu-interleave-size 8",
    "--dataloader-inter-document-masking",
]
REFUSED_BY_TWO_ROWS = [
    "--experimental-attention-variant gated_delta_net --mtp-num-layers 1",
    "--cuda-graph-impl full_iteration",
    "--window-size 8,0 --transformer-impl transformer_engine",
]
ALLOWED = [
    "",
    "--context-parallel-size 1",
    "--distributed-backend gloo --transformer-impl local --attention-backend auto",
    "--attention-backend unfused",
    "--fp32-residual-connection",
    "--recompute-modules mlp moe core_attn --disable-bias-linear",
    "--profile --use-pytorch-profiler",
    "--moe-token-dispatcher-type alltoall",
]


def parse(command_lines):
    """Return (problems, options that need a GPU and are asked for, number of such rows) for each command line."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    from megatron_ext.backends.cpu import problems, set_argument_defaults
    from megatron_ext.options import ROWS

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    set_argument_defaults(parser)
    rows = [row for row in ROWS if row.verdicts["cpu"].status == "needs a GPU"]
    results = []
    for line in command_lines:
        args = parser.parse_args(line.split())
        fired = [row.option for row in rows if row.asked(args)]
        results.append((problems(args), fired, len(rows)))
    return results


def test_each_option_that_cannot_work_is_refused_alone_and_by_name():
    (results,) = run_ranks(parse, 1, REFUSED + REFUSED_BY_TWO_ROWS)
    for line, (found, _, _) in zip(REFUSED + REFUSED_BY_TWO_ROWS, results, strict=True):
        assert len(found) == 1 + (line in REFUSED_BY_TWO_ROWS), (line, found)
        assert any(line.split()[0] in sentence for sentence in found)
        assert all(" cannot work on CPU: " in sentence and "; " in sentence for sentence in found)
    fired = {option for _, options, _ in results for option in options}
    assert len(fired) == results[0][2]  # every row has its line here


def test_what_works_is_not_refused():
    (results,) = run_ranks(parse, 1, ALLOWED)
    assert [found for found, _, _ in results] == [[]] * len(ALLOWED)


def test_a_run_with_refused_options_ends_with_one_error_that_names_them_all():
    arguments = toy_gpt(context_parallel_size=2, fp8_format="hybrid", use_precision_aware_optimizer=True)
    for rank in run_failing_pretrain(arguments, 2):
        assert rank.exit_code != 0
        for name in ("--context-parallel-size", "--fp8-format", "--use-precision-aware-optimizer"):
            assert name in rank.traceback
        assert "3 problems" in rank.traceback


def chosen(model, optimizer, args):
    """Probe: the values that the backend has an opinion on."""
    from megatron_ext.backends.cpu.options import ARGUMENT_DEFAULTS

    return {name: getattr(args, name) for name in ARGUMENT_DEFAULTS}


BARE = dict.fromkeys(
    (
        "num_workers",
        "distributed_backend",
        "transformer_impl",
        "attention_backend",
        "no_gradient_accumulation_fusion",
        "no_masked_softmax_fusion",
        "no_bias_gelu_fusion",
        "no_bias_dropout_fusion",
        "no_persist_layer_norm",
    )
)


def test_a_command_without_any_word_about_the_backend_runs():
    explicit = run_pretrain(toy_gpt(train_iters=2), 1)
    plain = run_pretrain(toy_gpt(BARE, train_iters=2, swiglu=True, position_embedding_type="rope"), 1, probe=chosen)
    assert len(plain[0].losses) == 2
    assert plain[0].probe["distributed_backend"] == "gloo"
    same_model = run_pretrain(toy_gpt(BARE, train_iters=2), 1)
    assert same_model[0].losses == explicit[0].losses


def explicit_values():
    """Return what Megatron's parser, with the backend's defaults, makes of explicit values."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    from megatron_ext.backends.cpu import set_argument_defaults

    parser = argparse.ArgumentParser()
    add_megatron_arguments(parser)
    set_argument_defaults(parser)
    args = parser.parse_args(
        ["--num-workers", "3", "--transformer-impl", "transformer_engine", "--distributed-backend", "nccl"]
    )
    return args.num_workers, args.transformer_impl, args.distributed_backend


def test_explicit_values_win_over_the_defaults():
    assert run_ranks(explicit_values, 1) == [(3, "transformer_engine", "nccl")]


UNTRAINED = {
    "on one rank": (1, {}, "--num-experts with biases is not supported: Megatron 0.19 fails on biases of experts"),
    "over ranks": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 1},
        "--num-experts with biases is not supported: ",
    ),
    "shared": (
        2,
        {"expert_model_parallel_size": 2, "moe_shared_expert_intermediate_size": 16},
        "--moe-shared-expert-intermediate-size with biases is not supported: ",
    ),
}


@pytest.mark.parametrize("experts", UNTRAINED)
def test_experts_whose_biases_megatron_fails_on_are_refused_before_they_are_built(experts):
    ranks, options, said = UNTRAINED[experts]
    exits = run_failing_pretrain(toy_gpt(MOE, options), ranks)
    assert said in exits[0].stderr and "give --disable-bias-linear" in exits[0].stderr
    assert "Traceback" not in exits[0].stderr


def test_a_cause_that_the_backend_and_a_feature_share_is_said_once():
    run = toy_gpt(use_local_sgd=True, local_sgd_workers=2, rampup_batch_size=("4", "4", "8"))
    exits = run_failing_pretrain(run, 2)
    said = "megatron-ext: error: arguments: --rampup-batch-size is not supported: Megatron 0.19 reads it and ignores it"
    assert "".join(rank.stderr for rank in exits).count(said) == 1


def test_checkpoints_that_replace_each_other_need_a_type_and_a_folder():
    (told,) = run_failing_pretrain(toy_gpt(non_persistent_save_interval=2, save="folder", save_interval=4), 1)
    assert "--non-persistent-ckpt-type is not supported: Megatron fails at the first of these" in told.stderr
    (trained,) = run_pretrain(toy_gpt(non_persistent_save_interval=2, non_persistent_ckpt_type="global"), 1)
    assert "--non-persistent-save-interval has no effect without --save" in trained.stdout
