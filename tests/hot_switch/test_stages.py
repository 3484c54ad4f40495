# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages by Megatron's own options: home has them, and guests what follows from them."""

import pytest

from tests.hot_switch.runs import (
    COMMON,
    arguments,
    assert_equal_except_for_rounding,
    full_parameters,
    hot_run,
    same_weights,
    says,
    stock_run,
)
from tests.support.every_run import one_of_each
from tests.support.presets import MOE, Options, toy_gpt
from tests.support.pretrain import run_pretrain

INTERLEAVED: Options = {
    "num_layers": 4,
    "num_layers_per_virtual_pipeline_stage": 1,
    "microbatch_group_size_per_virtual_pipeline_stage": 3,
}
ENDS_COUNT: Options = {
    "num_layers": 6,
    "num_virtual_stages_per_pipeline_rank": 2,
    "account_for_embedding_in_pipeline_split": True,
    "account_for_loss_in_pipeline_split": True,
}
LISTED: Options = {"num_layers": 5, "pipeline_model_parallel_layout": "Et|tt|tt|L"}
FIRST_AND_LAST: Options = {
    "num_layers": 5,
    "decoder_first_pipeline_num_layers": 2,
    "decoder_last_pipeline_num_layers": 3,
}


@pytest.mark.parametrize(
    ("strategies", "options", "guest"),
    one_of_each(
        [
            (["1,2,2", "2,1,2", "1,1,4"], INTERLEAVED, "2,1,2 vpp2"),
            (["2,1,2", "1,2,2", "1,1,4"], ENDS_COUNT, "1,1,4 layers1-2-2-1"),
            (["1,2,2", "2,1,2", "1,1,4"], LISTED, "2,1,2 vpp2 layers1-2-2-0"),
            (["2,1,2", "4,1,1", "1,1,4"], FIRST_AND_LAST, "1,1,4 layers1-2-1-1"),
        ],
        {2},
    ),
    ids=["interleaved", "embedding and loss count", "listed", "first and last"],
)
def test_stages_of_the_command_line_are_homes(strategies, options, guest):
    options = {**options, "use_distributed_optimizer": True, "train_iters": 8}
    hot = hot_run(strategies, [32, 16, 8, 0], **options)
    stock = stock_run(strategies[0], **options)
    assert_equal_except_for_rounding(hot, stock)
    assert says(hot, f"guest {guest} takes")


STAGES_FIRST = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {dp: 2, tp: 1, pp: 2}
  - {dp: 1, tp: 2, pp: 2, sequence_parallel: true}
  - {dp: 4, tp: 1, pp: 1, ep: 2}
"""


@pytest.mark.slow
def test_stages_before_replicas_change_nothing(tmp_path):
    file = tmp_path / "strategies.yaml"
    file.write_text(STAGES_FIRST)
    options = {
        **MOE,
        "moe_aux_loss_coeff": 0.0,
        "disable_bias_linear": True,
        "use_distributed_optimizer": True,
        "use_tp_pp_dp_mapping": True,
        "train_iters": 8,
    }
    hot = run_pretrain(toy_gpt(COMMON, options, hot_switch_strategy_file=str(file)), 4, probe=full_parameters)
    stock = stock_run("2,1,2", **options)
    assert_equal_except_for_rounding(hot, stock)


def test_stages_before_replicas_that_share_rows_change_nothing():
    options = {"use_tp_pp_dp_mapping": True, "use_distributed_optimizer": True, "train_iters": 8}
    cut = {"context_parallel_size": 2, "expert_tensor_parallel_size": 2}
    command = arguments(["1,1,2", "1,1,2"], [32, 16, 0], **cut, **options)
    hot = run_pretrain(command, 4, probe=full_parameters, before=same_weights)
    assert_equal_except_for_rounding(hot, stock_run("2,1,2", same_weights, **options))


@pytest.mark.slow
def test_guests_cut_experts_as_home_does_where_that_fits():
    options = {
        **MOE,
        "moe_aux_loss_coeff": 0.0,
        "disable_bias_linear": True,
        "expert_model_parallel_size": 4,
        "train_iters": 8,
    }
    hot = hot_run(["4,1,1", "2,2,1", "2,1,2"], [32, 16, 8, 0], **options)
    assert_equal_except_for_rounding(hot, stock_run("4,1,1", **options))
    assert says(hot, "guest 2,2,1 ep4 takes") and says(hot, "guest 2,1,2 ep2 takes")
