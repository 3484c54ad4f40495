# SPDX-License-Identifier: Apache-2.0
"""Training with hot switching computes what stock Megatron computes on the same documents."""

import re

import numpy as np
import pytest

from tests.hot_switch.runs import (
    COMMON,
    EXPERTS_APART,
    GUESTS_OF_PARTS,
    LLAMA,
    PARTS_OF_ROWS,
    assert_equal_except_for_rounding,
    full_parameters,
    hot_run,
    losses,
    many_rounds,
    one_document_per_row,
    same_weights,
    says,
    stock_run,
    tell_padding,
)
from tests.support.every_run import one_of_each
from tests.support.presets import LATENT, MOE, PRECISIONS, Options, toy_gpt
from tests.support.pretrain import run_pretrain


@pytest.mark.parametrize(
    ("strategies", "passes_on", "options"),
    one_of_each(
        [
            (["1,2,2", "4,1,1", "2,1,2"], False, {}),
            (
                ["2,2,1", "1,4,1", "1,2,2"],
                True,
                {**LLAMA, "use_distributed_optimizer": True, "sequence_parallel": True},
            ),
        ],
        {1},
    ),
    ids=["tp and pp at home", "distributed optimizer and sequence parallel"],
)
def test_hot_equals_static(strategies, passes_on, options):
    hot = hot_run(strategies, [32, 16, 8, 0], **options)
    stock = stock_run(strategies[0], **options)
    assert_equal_except_for_rounding(hot, stock)
    assert says(hot, "of gradients to guest 1,2,2") == passes_on


INTERLEAVED = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {dp: 1, tp: 2, pp: 2, vpp: 2, first_stage_layers: 4, sequence_parallel: true, recompute: full}
  - {dp: 4, tp: 1, pp: 1, micro_batch_size: 2}
  - {dp: 2, tp: 1, pp: 2, vpp: 2, stage_layers: [1, 2, 3, 0], micro_batch_group: 3, recompute: selective}
"""


@pytest.mark.slow
def test_interleaved_and_uneven_stages_rows_and_recomputation_of_each_strategy_change_nothing(tmp_path):
    file = tmp_path / "strategies.yaml"
    file.write_text(INTERLEAVED)
    options = {"num_layers": 6}
    command = toy_gpt(COMMON, options, hot_switch_strategy_file=str(file))
    hot = run_pretrain(command, 4, probe=full_parameters, before=many_rounds)
    stages = {"num_virtual_stages_per_pipeline_rank": 2, "decoder_first_pipeline_num_layers": 4}
    stock = stock_run("1,2,2", **stages, sequence_parallel=True, **options)
    assert_equal_except_for_rounding(hot, stock)


@pytest.mark.parametrize(
    ("strategies", "home", "options"),
    [
        pytest.param(
            PARTS_OF_ROWS,
            "2,1,2",
            {**LLAMA, "use_distributed_optimizer": True, "num_layers": 4},
            id="home and a guest",
            marks=pytest.mark.slow,
        ),
        pytest.param(GUESTS_OF_PARTS, "2,1,2", {"num_layers": 4}, id="guests only"),
        pytest.param(
            PARTS_OF_ROWS,
            "2,1,2",
            {**LATENT, "use_distributed_optimizer": True},
            id="latent attention",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_context_parallelism_changes_nothing(tmp_path, strategies, home, options):
    file = tmp_path / "strategies.yaml"
    file.write_text(strategies)
    command = toy_gpt(COMMON, options, hot_switch_strategy_file=str(file))
    hot = run_pretrain(command, 4, probe=full_parameters, before=many_rounds)
    assert_equal_except_for_rounding(hot, stock_run(home, **options))


def test_a_part_of_a_row_may_be_without_the_padding_of_the_row(tmp_path):
    file = tmp_path / "strategies.yaml"
    file.write_text("bucket_sizes: [32, 0]\nstrategies:\n  - {dp: 1, tp: 1, pp: 1, cp: 2}\n")
    # Few rows, so that of each step's the rank in the middle of rows has often none with padding there.
    few: Options = {"train_iters": 8, "global_batch_size": 2}
    command = toy_gpt(COMMON, few, hot_switch_strategy_file=str(file))
    parts = run_pretrain(command, 2, probe=full_parameters, before=same_weights)
    command = toy_gpt(COMMON, few, hot_switch_strategies=["1,1,1"], hot_switch_bucket_sizes=[32, 0])
    whole = run_pretrain(command, 1, probe=full_parameters, before=same_weights)
    assert_equal_except_for_rounding(parts, whole)


def test_experts_on_other_ranks_for_each_strategy_change_nothing(tmp_path):
    file = tmp_path / "strategies.yaml"
    file.write_text(EXPERTS_APART)
    options = {**MOE, "moe_aux_loss_coeff": 0.0, "use_distributed_optimizer": True}
    # Unlike the balancing loss this one does not depend on what shares a micro-batch.
    options["moe_z_loss_coeff"] = 0.1
    # Megatron 0.19 fails on experts with biases whose tensor parallel size differs from that of the rest.
    options["disable_bias_linear"] = True
    command = toy_gpt(COMMON, options, hot_switch_strategy_file=str(file))
    hot = run_pretrain(command, 4, probe=full_parameters, before=many_rounds)
    stock = stock_run("4,1,1", tell_padding, expert_model_parallel_size=2, **options)
    assert_equal_except_for_rounding(hot, stock)
    assert says(hot, "of gradients to guest 2,2,1")


def test_biases_of_routers_follow_the_tokens_of_all_strategies(tmp_path):
    file = tmp_path / "strategies.yaml"
    file.write_text(EXPERTS_APART)
    options = {
        **MOE,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.01,
        "disable_bias_linear": True,
        "use_distributed_optimizer": True,
        "train_iters": 6,
    }
    hot = run_pretrain(toy_gpt(COMMON, options, hot_switch_strategy_file=str(file)), 4, probe=full_parameters)
    stock = stock_run("4,1,1", tell_padding, expert_model_parallel_size=2, **options)
    assert_equal_except_for_rounding(hot, stock)
    biases = [hot[0].probe[f"decoder.layers.{layer}.mlp.router.expert_bias"] for layer in range(2)]
    assert all(np.abs(bias).max() > 0.015 for bias in biases)


BALANCED = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {HOME, tp: 1, pp: 1, ep: 2}
  - {dp: 1, tp: 2, pp: 2, ep: 2, etp: 1, sequence_parallel: true, recompute: full}
  - {dp: 1, tp: 2, pp: 1, cp: 2, ep: 4, etp: 1, sequence_parallel: true}
"""


def reported(ranks, name):
    """The values of a loss that the log lines give."""
    return [float(value) for value in re.findall(rf" {name}: (\S+)", ranks[-1].stdout)]


@pytest.mark.parametrize("home", one_of_each(["dp: 4", "dp: 2, cp: 2"], {1}))
def test_losses_of_routers_are_those_of_the_same_micro_batches(tmp_path, home):
    file = tmp_path / "strategies.yaml"
    file.write_text(BALANCED.replace("HOME", home))
    options = {**MOE, "moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.1, "train_iters": 5, "disable_bias_linear": True}
    command = toy_gpt(COMMON, options, hot_switch_strategy_file=str(file))
    hot = run_pretrain(command, 4, probe=full_parameters, before=(one_document_per_row, same_weights))
    options["expert_model_parallel_size"] = 2
    stock = stock_run("4,1,1", tell_padding, one_document_per_row, same_weights, **options)
    assert_equal_except_for_rounding(hot, stock)
    balancing = reported(hot, "load_balancing_loss")
    assert len(balancing) == 5 and all(balancing)
    assert balancing == pytest.approx(reported(stock, "load_balancing_loss"), rel=1e-4)


@pytest.mark.parametrize(
    ("strategies", "buckets", "says_so"),
    [
        # The second guest often has no data: the first one's gradients go home then.
        (["2,1,1", "1,2,1", "1,1,2"], [32, 31, 30, 0], "of gradients to guest 1,1,2"),
        # The first guest often has no data: the second one's parameters come from home then.
        (["1,2,1", "2,1,1", "1,1,2"], [32, 2, 1, 0], "of parameters from guest 2,1,1"),
    ],
    ids=["mostly shortest", "mostly longest"],
)
def test_strategies_without_data_in_a_step_change_nothing(strategies, buckets, says_so):
    options = {"train_iters": 6, "global_batch_size": 2, "optimizer": "sgd", "lr": 0.1}
    hot = hot_run(strategies, buckets, **options)
    stock = stock_run(strategies[0], **options)
    assert_equal_except_for_rounding(hot, stock)
    assert says(hot, says_so)


def test_the_gradient_is_the_same_however_sequences_are_shared_out():
    # So that the parameters are those of the beginning less the gradient.
    one_step = {"train_iters": 1, "optimizer": "sgd", "sgd_momentum": 0.0, "lr": 1.0, "weight_decay": 0.0}
    options = {**one_step, "lr_decay_style": "constant", "clip_grad": 0.0}
    one = hot_run(["1,1,2"], [32, 0], **options)
    for above in (12, 24):
        ranks = hot_run(["1,1,2", "2,1,1"], [32, above, 0], **options)
        assert ranks[0].grad_norms == pytest.approx(one[0].grad_norms, rel=1e-6)
        for name, value in ranks[0].probe.items():
            np.testing.assert_allclose(value, one[0].probe[name], rtol=0, atol=1e-6, err_msg=name)


SUMS_IN_BF16 = {
    **PRECISIONS["bf16-distopt"],
    "grad_reduce_in_bf16": True,
    "ddp_reduce_scatter_with_fp32_accumulation": True,
    "data_parallel_random_init": True,
    "check_weight_hash_across_dp_replicas_interval": 5,
}


@pytest.mark.parametrize("options", [PRECISIONS["bf16-distopt-overlap"], SUMS_IN_BF16], ids=["fp32 sums", "bf16 sums"])
def test_bf16_stays_as_near_to_stock_as_rounding_allows(options):
    options = {**options, "lr": 2e-3, "train_iters": 10}
    hot = hot_run(["2,1,1", "1,2,1"], [32, 12, 0], **options)
    stock = stock_run("2,1,1", **options)
    assert losses(hot) == pytest.approx(losses(stock), abs=0.02)
    assert hot[0].grad_norms == pytest.approx(stock[0].grad_norms, rel=0.02)
    assert losses(stock)[-1] < losses(stock)[0]  # it learns meanwhile


def test_fp16_skips_the_steps_that_stock_skips_and_stays_as_near_as_rounding_allows():
    # The scale is too large for the first steps, and grows again later.
    options = {"fp16": True, "initial_loss_scale": 2.0**16, "hysteresis": 1, "loss_scale_window": 4, "train_iters": 15}
    hot = hot_run(["2,1,1", "1,2,1"], [32, 12, 0], **options)
    stock = stock_run("2,1,1", **options, accumulate_allreduce_grads_in_fp32=True)
    scales = loss_scales(hot)
    assert scales == loss_scales(stock)
    assert scales[0] > min(scales) < scales[-1]
    assert losses(hot) == pytest.approx(losses(stock), abs=1e-3)
    # Steps that are skipped have no norm.
    norms = [(ours, theirs) for ours, theirs in zip(hot[0].grad_norms, stock[0].grad_norms, strict=True) if theirs]
    assert 5 < len(norms) < 15
    assert [ours for ours, _ in norms] == pytest.approx([theirs for _, theirs in norms], rel=0.01)


def loss_scales(ranks):
    """The scale of the loss in every step."""
    return [float(scale) for scale in re.findall(r"loss scale: (\S+)", ranks[-1].stdout)]


def test_options_that_change_no_result():
    run = (["2,1,1", "1,2,1"], [32, 12, 0])
    # Without clipping: buckets change the order in which the norm is summed up.
    common = {"train_iters": 4, "use_distributed_optimizer": True, "bf16": True, "clip_grad": 0.0}
    plain = hot_run(*run, **common)
    with_options = hot_run(
        *run,
        **common,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        ddp_num_buckets=3,
        ddp_pad_buckets_for_high_nccl_busbw=True,
        ddp_average_in_collective=True,
        no_align_grad_reduce=True,
        no_align_param_gather=True,
        disable_gloo_process_groups=True,
        exit_signal_handler=True,
        exit_duration_in_mins=60,
        log_straggler=True,
    )
    assert losses(plain) == losses(with_options)
    assert [rank.parameters for rank in plain] == [rank.parameters for rank in with_options]
    assert len(set(losses(plain))) == 4
    assert says(with_options, "--ddp-average-in-collective is dropped")


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        # Thresholds are in tokens, 32 to a sample.
        ([8, 8, 16, 16], {"step_batch_size_schedule": "0:8 512:16", "global_batch_size": None, "train_iters": None}),
        (
            [8, 8, 8],
            {
                "decrease_batch_size_if_needed": True,
                "global_batch_size": 9,
                "eval_global_batch_size": 8,
                "train_iters": 3,
            },
        ),
    ],
    ids=["growing", "smaller than asked"],
)
def test_steps_have_as_many_sequences_as_megatron_says(sizes, options):
    samples = {"train_samples": 48, "lr_decay_samples": 48} if options["train_iters"] is None else {}
    # SGD: what Adam makes of gradients near 0 is rounding.
    options = {**options, **samples, "optimizer": "sgd", "lr": 0.1}
    hot = hot_run(["2,1,1", "1,2,1"], [32, 16, 0], **options)
    assert_equal_except_for_rounding(hot, hot_run(["2,1,1"], [32, 0], **options))
    found = re.findall(r"consumed samples: +(\d+) \|", hot[-1].stdout)
    assert [int(count) for count in found] == [sum(sizes[: step + 1]) for step in range(len(sizes))]
    assert len(losses(hot)) == len(sizes)
