# SPDX-License-Identifier: Apache-2.0
"""Options of Megatron in bundles: strategies against stock Megatron, a save and a resume with a bundle at once."""

import math
import os
from typing import Any

import pytest

from tests.hot_switch.runs import (
    COMMON,
    LLAMA,
    arguments,
    assert_equal_except_for_rounding,
    assert_resumed,
    full_parameters,
    losses,
    same_weights,
    stock_run,
)
from tests.support.every_run import one_of_each
from tests.support.option_bundles import MODELS, changed_values
from tests.support.presets import Options, Value, toy_gpt
from tests.support.pretrain import run_failing_pretrain, run_pretrain

# What a run with strategies has otherwise than the stock one here.
CHANGED = {
    *("save", "save_interval"),
    "rerun_mode",  # hot switching repeats no step
    "bias_swiglu_fusion",  # a default of runs on CPU
}
PARTS = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {dp: 1, tp: 2, pp: 1, recompute: full}
  - {dp: 1, tp: 1, pp: 1, cp: 2, recompute: full}
  - {dp: 2, tp: 1, pp: 1}
"""
REPLICAS = """
bucket_sizes: [32, 12, 0]
strategies: [{dp: 2, tp: 1, pp: 1}, {dp: 1, tp: 2, pp: 1}]
"""
# Windows shorter than most documents, in every other layer.
POSITIONS: Options = {
    **LLAMA,
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 8,
    "window_size": "3,0",
    "window_attn_skip_freq": 2,
    "num_layers": 3,
    "distribute_saved_activations": True,
}
# What the file of strategies says to others.
RECOMPUTATION: Options = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SUMS: Options = {
    "bf16": True,
    "use_distributed_optimizer": True,
    "grad_reduce_in_bf16": True,
    "ddp_param_name_patterns_for_fp32_local_accumulation": ["*linear*"],
}
INTERLEAVED = """
bucket_sizes: [32, 12, 0]
strategies: [{dp: 2, tp: 1, pp: 2, vpp: 2}, {dp: 4, tp: 1, pp: 1}]
"""
GATHERING: Options = {
    "num_layers": 4,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "overlap_param_gather_with_optimizer_step": True,
    "mtp_standalone": True,
    "ckpt_format": "torch",
}
CHUNKS: Options = {"num_virtual_stages_per_pipeline_rank": 2}


def nearly(hot, stock):
    """As near as bf16 allows."""
    assert losses(hot) == pytest.approx(losses(stock), abs=0.02)
    assert hot[0].grad_norms == pytest.approx(stock[0].grad_norms, rel=0.02)


STAGES = """
bucket_sizes: [32, 12, 0]
strategies: [{dp: 2, tp: 1, pp: 1}, {dp: 1, tp: 1, pp: 2}]
"""


def model(name: str, *without: str, strategies: str = REPLICAS, **changed: Value) -> tuple[Any, ...]:
    """A model of the bundles that all features share, without what hot switching refuses."""
    options = {key: value for key, value in MODELS[name].items() if key not in without}
    return strategies, "2,1,1", {**options, **changed}, {}, assert_equal_except_for_rounding


BUNDLES = {
    "yarn, windows, saved activations": (PARTS, "1,2,1", POSITIONS, RECOMPUTATION, assert_equal_except_for_rounding),
    "gathering in the optimizer's step": (INTERLEAVED, "2,1,2", GATHERING, CHUNKS, assert_equal_except_for_rounding),
    "fp32 local accumulation": (REPLICAS, "2,1,1", SUMS, {}, nearly),
    "gates, windows, scaled positions": model("gates, windows, scaled positions"),
    "widths that transfer, masks by document": model("widths that transfer, masks by document", "softmax_type"),
    "clamped units, YaRN": model("clamped units, YaRN, learned softmax", "softmax_type"),
    "latent attention": model("latent attention", strategies=STAGES),
    "experts in groups": model(
        "experts in groups with a capacity",
        "moe_expert_capacity_factor",
        "moe_token_drop_policy",
        strategies=STAGES,
        moe_aux_loss_coeff=0.0,
    ),
    "one expert": model(
        "one expert, balanced globally",
        "moe_router_load_balancing_type",
        strategies=STAGES,
        moe_aux_loss_coeff=0.0,
    ),
    "another softmax over whole rows": (
        REPLICAS,
        "2,1,1",
        {"softmax_type": "learnable", "hot_switch_attention": "rows"},
        {"hot_switch_attention": None},
        assert_equal_except_for_rounding,
    ),
}


@pytest.mark.parametrize("bundle", one_of_each(list(BUNDLES), {0, 1, 2}))
def test_hot_equals_static_and_a_resume_keeps_the_bits(tmp_path, bundle):
    strategies, home, options, of_stock, compare = BUNDLES[bundle]
    file = tmp_path / "strategies.yaml"
    file.write_text(strategies)
    options = {**options, "train_iters": 6}
    hot = {**options, "hot_switch_strategy_file": os.fspath(file)}
    folder, ranks = os.fspath(tmp_path / "saved"), math.prod(map(int, home.split(",")))

    def run(**where):
        return run_pretrain(toy_gpt(COMMON, hot, **where), ranks, probe=full_parameters, before=same_weights)

    through = run(save=folder, save_interval=3)
    stock = stock_run(home, same_weights, **{**options, **of_stock})
    compare(through, stock)
    assert changed_values(through[0].stdout, stock[0].stdout).keys() <= CHANGED
    (tmp_path / "saved/latest_checkpointed_iteration.txt").write_text("3")
    assert_resumed(run(load=folder), through, after=3)
    assert len(set(losses(through))) == 6  # a run that does not move would resume exactly, too


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window_size": "3,0", "hot_switch_attention": "rows"}, "rows is not combined with --window-size, with which"),
        ({"window_size": "3,1"}, "and to none that follow; give --window-size N,0"),
    ],
    ids=["over whole rows", "ahead"],
)
def test_windows_that_would_not_be_kept_are_refused(options, said):
    (exit_of_rank,) = run_failing_pretrain(arguments(["1,1,1"], [32, 0], **options), 1)
    assert said in exit_of_rank.stderr and "Traceback" not in exit_of_rank.stderr
