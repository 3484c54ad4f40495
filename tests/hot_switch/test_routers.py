# SPDX-License-Identifier: Apache-2.0
"""Routers of experts: what they compute over documents is what stock Megatron's compute over rows of one."""

import pytest

from tests.hot_switch.runs import (
    COMMON,
    assert_equal_except_for_rounding,
    full_parameters,
    many_rounds,
    same_weights,
    stock_run,
    tell_padding,
)
from tests.support.every_run import one_of_each
from tests.support.presets import MOE, toy_gpt
from tests.support.pretrain import run_pretrain

STRATEGIES = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {dp: 4, tp: 1, pp: 1, ep: 2}
  - {dp: 1, tp: 2, pp: 2, ep: 2, etp: 1, micro_batch_size: 2, sequence_parallel: true, recompute: full}
  - {dp: 1, tp: 2, pp: 1, cp: 2, ep: 4, etp: 1, sequence_parallel: true}
"""
ROUTING = {
    **MOE,
    "disable_bias_linear": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 1.5,
    "moe_z_loss_coeff": 0.1,
    "expert_model_parallel_size": 2,
}


@pytest.mark.parametrize(
    "home",
    one_of_each(["dp: 4", "dp: 2, cp: 2"], {1}),
    ids=["whole rows at home", "parts of rows at home"],
)
def test_losses_by_sequence_are_those_of_documents(tmp_path, home):
    file = tmp_path / "strategies.yaml"
    file.write_text(STRATEGIES.replace("dp: 4", home))
    options = {
        **ROUTING,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1.0,
        "train_iters": 10,
    }
    command = toy_gpt(COMMON, {**options, "expert_model_parallel_size": 1}, hot_switch_strategy_file=str(file))
    hot = run_pretrain(command, 4, probe=full_parameters, before=(many_rounds, same_weights))
    assert_equal_except_for_rounding(hot, stock_run("4,1,1", tell_padding, same_weights, **options))
