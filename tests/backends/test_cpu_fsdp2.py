# SPDX-License-Identifier: Apache-2.0
"""Megatron over torch's FSDP2 (--use-torch-fsdp2) on CPU + gloo: what it computes, and that it resumes."""

import os

import pytest

from tests.backends.runs import losses, stock
from tests.support.every_run import one_of_each
from tests.support.presets import LAYOUTS, Options, toy_gpt
from tests.support.pretrain import run_pretrain

UNTIED: Options = {"untie_embeddings_and_output_weights": True}
FSDP2: Options = {**UNTIED, "use_torch_fsdp2": True}
GATED: Options = {"bf16": True, "swiglu": True, "disable_bias_linear": True}


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(2, {}, id="dp2"),
        pytest.param(2, {"torch_fsdp2_no_reshard_after_forward": True, "eval_iters": 1, "eval_interval": 3}, id="kept"),
        pytest.param(
            4,
            {**LAYOUTS["tp2-sp"].options, "recompute_granularity": "selective"},
            id="dp2-tp2-sp",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_parameters_sharded_by_fsdp2_train_as_whole_ones_do(ranks, more):
    whole = stock(toy_gpt(UNTIED, more, torch_fsdp2_no_reshard_after_forward=None), ranks)
    sharded = stock(toy_gpt(FSDP2, more), ranks)
    assert len(losses(sharded)) == 4
    assert losses(sharded) == pytest.approx(losses(whole), rel=1e-6)
    assert sharded[0].grad_norms == pytest.approx(whole[0].grad_norms, rel=1e-5)
    assert sharded[0].parameters != sharded[-1].parameters  # each rank has rows of its own


@pytest.mark.parametrize(
    "more", one_of_each([{}, GATED, {"optimizer": "sgd"}], {1}), ids=["fp32", "bf16-swiglu", "sgd"]
)
def test_a_run_with_fsdp2_resumes_to_the_last_bit(more, tmp_path):
    options = {**FSDP2, **more, "train_iters": 4}
    whole = run_pretrain(toy_gpt(options), 2)
    folder = os.fspath(tmp_path)
    run_pretrain(toy_gpt(options, save=folder, save_interval=2, exit_interval=2), 2)
    resumed = run_pretrain(toy_gpt(options, load=folder), 2)
    assert losses(resumed) == losses(whole)[2:]
    for rank, expected in zip(resumed, whole, strict=True):
        assert (rank.parameters, rank.optimizer) == (expected.parameters, expected.optimizer)
