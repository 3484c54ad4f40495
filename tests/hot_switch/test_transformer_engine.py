# SPDX-License-Identifier: Apache-2.0
"""Hot switching on Megatron's Transformer Engine layers, on a double of that package: the real one needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hot_switch.runs import (
    COMMON,
    EXPERTS_APART,
    LLAMA,
    PARTS_OF_ROWS,
    arguments,
    assert_equal_except_for_rounding,
    assert_resumed,
    forbid_attention_by_document,
    full_parameters,
    losses,
    many_rounds,
    stock_run,
    tell_padding,
)
from tests.support.presets import GROUPED, LATENT, toy_gpt
from tests.support.pretrain import run_pretrain
from tests.support.transformer_engine import accept_transformer_engine, fuse_the_accumulation_of_gradients

pytestmark = pytest.mark.usefixtures("double_of_transformer_engine")

TE = {"transformer_impl": "transformer_engine", "attention_backend": "auto"}

DENSE = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {dp: 2, tp: 2, pp: 1, sequence_parallel: true}
  - {dp: 1, tp: 4, pp: 1}
  - {dp: 1, tp: 2, pp: 2, sequence_parallel: true, micro_batch_size: 2, recompute: selective}
"""
STAGES = """
bucket_sizes: [32, 12, 0]
strategies:
  - {dp: 1, tp: 2, pp: 2, vpp: 2}
  - {dp: 4, tp: 1, pp: 1, micro_batch_size: 2, recompute: full}
"""
DEFERRED = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {dp: 1, tp: 2, pp: 2}
  - {dp: 4, tp: 1, pp: 1}
  - {dp: 1, tp: 2, pp: 2, vpp: 2, sequence_parallel: true}
"""
EXPERTS = {**GROUPED, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.1}


def forbid_attention_at_once():
    """The reverse."""
    from megatron_ext.hot_switch.runtime import document_attention as attention

    attention._attend_at_once = None


def nothing():
    """Both are used."""


@pytest.mark.parametrize(
    ("strategies", "home", "layout", "forbidden", "options"),
    [
        pytest.param(
            DENSE,
            "2,2,1",
            {"sequence_parallel": True},
            forbid_attention_by_document,
            {**LLAMA, "use_distributed_optimizer": True},
            id="tensor parallel",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            STAGES,
            "1,2,2",
            {"num_virtual_stages_per_pipeline_rank": 2},
            forbid_attention_by_document,
            {"num_layers": 4},
            id="stages and biases",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            DENSE,
            "2,2,1",
            {"sequence_parallel": True},
            forbid_attention_at_once,
            {**LLAMA, "attention_backend": "unfused"},
            id="no kernels",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            PARTS_OF_ROWS,
            "2,1,2",
            {},
            nothing,
            {**LLAMA, "num_layers": 4},
            id="parts of rows",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            DENSE,
            "2,2,1",
            {"sequence_parallel": True},
            forbid_attention_at_once,
            LATENT,
            id="latent attention",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            EXPERTS_APART,
            "4,1,1",
            {"expert_model_parallel_size": 2},
            forbid_attention_by_document,
            {**EXPERTS, "use_distributed_optimizer": True},
            id="grouped experts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            EXPERTS_APART,
            "4,1,1",
            {"expert_model_parallel_size": 2},
            forbid_attention_by_document,
            {**EXPERTS, "moe_latent_size": 16},
            id="latent experts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_hot_equals_static(tmp_path: Path, strategies, home, layout, forbidden, options):
    file = tmp_path / "strategies.yaml"
    file.write_text(strategies)
    hot = run_pretrain(
        toy_gpt(COMMON, TE, options, hot_switch_strategy_file=str(file)),
        4,
        probe=full_parameters,
        before=(accept_transformer_engine, forbidden, many_rounds),
    )
    told = (tell_padding,) if strategies is EXPERTS_APART else ()
    stock = stock_run(home, accept_transformer_engine, *told, **{**TE, **layout, **options})
    assert_equal_except_for_rounding(hot, stock)


@pytest.mark.parametrize(
    ("strategies", "home", "layout", "options"),
    [
        pytest.param(
            DENSE,
            "2,2,1",
            {"sequence_parallel": True},
            {**LLAMA, "overlap_grad_reduce": True},
            id="dense",
            marks=pytest.mark.slow,
        ),
        pytest.param(EXPERTS_APART, "4,1,1", {"expert_model_parallel_size": 2}, EXPERTS, id="grouped experts"),
        pytest.param(
            DEFERRED,
            "1,2,2",
            {},
            {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 2, "num_layers": 4, "train_iters": 6},
            id="the output layer's after the others",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_products_that_add_their_gradients_themselves_change_nothing(tmp_path, strategies, home, layout, options):
    file = tmp_path / "strategies.yaml"
    file.write_text(strategies)
    options = {**TE, "use_distributed_optimizer": True, "no_gradient_accumulation_fusion": None, **options}
    before = (accept_transformer_engine, fuse_the_accumulation_of_gradients)
    command = toy_gpt(COMMON, options, hot_switch_strategy_file=str(file))
    hot = run_pretrain(command, 4, probe=full_parameters, before=(*before, many_rounds))
    told = (tell_padding,) if strategies is EXPERTS_APART else ()
    assert_equal_except_for_rounding(hot, stock_run(home, *before, *told, **{**layout, **options}))


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path):
    options = {**LLAMA, **TE, "use_distributed_optimizer": True, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    options |= {"train_iters": 4, "eval_iters": 1, "eval_interval": 3, "bf16": True}
    hot = ["2,1,1", "1,2,1"], [32, 12, 0]
    command = arguments(*hot, **options, save=str(tmp_path), save_interval=2)
    through = run_pretrain(command, 2, before=accept_transformer_engine)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = run_pretrain(arguments(*hot, **options, load=str(tmp_path)), 2, before=accept_transformer_engine)
    assert len(set(losses(through))) == 4
    assert_resumed(resumed, through, after=2)
    assert all("validation loss at iteration 3" in run[-1].stdout for run in (through, resumed))
