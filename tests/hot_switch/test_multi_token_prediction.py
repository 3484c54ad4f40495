# SPDX-License-Identifier: Apache-2.0
"""Layers of multi-token prediction learn the same under all strategies, and no document sees another in its row."""

import os
import re

import pytest

from tests.hot_switch.runs import (
    COMMON,
    LLAMA,
    assert_equal_except_for_rounding,
    assert_resumed,
    full_parameters,
    hot_run,
    many_rounds,
    stock_run,
    tell_padding,
)
from tests.support.presets import MOE, toy_gpt
from tests.support.pretrain import run_pretrain

MTP = {**LLAMA, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5, "train_iters": 6}
HOT = (["1,2,2", "4,1,1", "2,1,2"], [32, 16, 8, 0])

PARTS_AND_STAGES = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {dp: 1, tp: 2, pp: 2, vpp: 2, stage_layers: [1, 1, 1, 1], sequence_parallel: true, micro_batch_size: 2}
  - {dp: 1, tp: 1, pp: 2, cp: 2, stage_layers: [3, 1]}
  - {dp: 4, tp: 1, pp: 1, micro_batch_size: 2, recompute: full}
"""
EXPERTS = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {dp: 4, tp: 1, pp: 1, ep: 2}
  - {dp: 2, tp: 1, pp: 2, ep: 1, recompute: full}
  - {dp: 2, tp: 2, pp: 1, ep: 4, etp: 1, sequence_parallel: true}
"""
BALANCED = {
    **MOE,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
    "use_distributed_optimizer": True,
}


def reported(ranks, name):
    """The values of a loss that the log lines give."""
    return [float(value) for value in re.findall(rf" {name}: (\S+)", ranks[-1].stdout)]


def count_no_position_without_a_token():
    """Let stock Megatron see that of a row without padding the last position has no token to look ahead to."""
    from megatron.core.transformer import multi_token_prediction as module

    roll = module.roll_tensor

    def rolled(tensor, *args, **kwargs):
        found, total = roll(tensor, *args, **kwargs)
        if found is not None and str(found.dtype) == "torch.bool":
            found[..., -1] = True
        return found, total

    module.roll_tensor = rolled


def no_short_documents():
    """Leave every document a token in the last layer: of a row without any stock Megatron's loss is 0 / 0."""
    import numpy as np

    from megatron_ext.hot_switch.data.training_documents import MockDocuments

    make = MockDocuments.__init__

    def made(self, *, longest, vocab_size, seed):
        make(self, longest=longest, vocab_size=vocab_size, seed=seed)
        self._lengths = np.clip(self._lengths, 4, longest + 1)

    MockDocuments.__init__ = made


def from_file(tmp_path, text, options, *before):
    file = tmp_path / "strategies.yaml"
    file.write_text(text)
    command = toy_gpt(COMMON, options, hot_switch_strategy_file=str(file))
    return run_pretrain(command, 4, probe=full_parameters, before=(many_rounds, *before))


def test_hot_equals_static():
    hot = hot_run(*HOT, **MTP)
    assert_equal_except_for_rounding(hot, stock_run("1,2,2", **MTP))
    assert any(name.startswith("mtp.layers.1.") for name in hot[0].probe)
    static = hot_run(["1,2,2"], [32, 0], **MTP)
    for name in ("mtp_1 loss", "mtp_2 loss"):
        assert len(set(reported(hot, name))) == 6
        assert reported(hot, name) == pytest.approx(reported(static, name), abs=1e-5)


@pytest.mark.slow
def test_stages_and_parts_of_rows_change_nothing(tmp_path):
    options = {**MTP, "num_layers": 4}
    hot = from_file(tmp_path, PARTS_AND_STAGES, options)
    stages = {"num_virtual_stages_per_pipeline_rank": 2, "sequence_parallel": True}
    assert_equal_except_for_rounding(hot, stock_run("1,2,2", **stages, **options))


@pytest.mark.slow
def test_experts_there_and_their_routers_change_nothing(tmp_path):
    options = {**MTP, **BALANCED}
    hot = from_file(tmp_path, EXPERTS, options)
    told = (tell_padding, count_no_position_without_a_token)
    assert_equal_except_for_rounding(hot, stock_run("4,1,1", *told, expert_model_parallel_size=2, **options))
    assert "mtp.layers.1.mtp_model_layer.mlp.router.expert_bias" in hot[0].probe


@pytest.mark.slow
def test_a_layer_that_is_repeated_takes_the_loss_of_its_router_over_documents_each_time(tmp_path):
    sequences = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1.0}
    options = {**MTP, **BALANCED, **sequences, "mtp_use_repeated_layer": True}
    hot = from_file(tmp_path, EXPERTS, options, no_short_documents)
    told = (tell_padding, count_no_position_without_a_token, no_short_documents)
    assert_equal_except_for_rounding(hot, stock_run("4,1,1", *told, expert_model_parallel_size=2, **options))
    assert not any(name.startswith("mtp.layers.1.") for name in hot[0].probe)


def test_rows_with_masks_give_what_documents_do():
    options = {**MTP, "train_iters": 2}
    by_rows = hot_run(["1,2,1", "2,1,1"], [32, 12, 0], **options, hot_switch_attention="rows")
    assert_equal_except_for_rounding(by_rows, hot_run(["1,2,1", "2,1,1"], [32, 12, 0], **options))


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    # Stock Megatron 0.19 cannot save a distributed optimizer of these layers over two stages.
    options = {**MTP, "bf16": True, "hidden_dropout": 0.1, "eval_iters": 1, "train_iters": 4, "eval_interval": 3}
    run = (["2,1,2", "1,2,2", "4,1,1"], [32, 16, 8, 0])
    through = hot_run(*run, **options, save=os.fspath(tmp_path), save_interval=2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = hot_run(*run, **options, load=os.fspath(tmp_path))
    assert_resumed(resumed, through, after=2)
    # Megatron's later lines have means since the resume.
    assert reported(resumed, "mtp_1 loss")[0] == reported(through, "mtp_1 loss")[2]
