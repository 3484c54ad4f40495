# SPDX-License-Identifier: Apache-2.0
"""Attention in training and validation with hot switching: by document, over whole rows, over parts of rows."""

import re

import pytest

from tests.hot_switch.runs import (
    COMMON,
    LLAMA,
    arguments,
    assert_equal_except_for_rounding,
    forbid_attention_by_document,
    full_parameters,
    hot_run,
    same_weights,
)
from tests.support.presets import toy_gpt
from tests.support.pretrain import run_pretrain


def forbid_attention_over_rows():
    """Let Megatron's own attention fail."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    DotProductAttention.forward = None


def test_attention_over_whole_rows_changes_nothing():
    options = {**LLAMA, "train_iters": 5, "recompute_granularity": "selective", "eval_iters": 0}
    runs = [
        run_pretrain(
            arguments(["1,2,1", "2,1,1"], [32, 12, 0], hot_switch_attention=attention, **options),
            2,
            before=forbid_the_other,
            probe=full_parameters,
        )
        for attention, forbid_the_other in (
            ("documents", forbid_attention_over_rows),
            ("rows", forbid_attention_by_document),
        )
    ]
    assert_equal_except_for_rounding(*runs)


def test_validation_without_masks_has_the_losses_of_validation_with_them():
    options = {"train_iters": 2, "eval_interval": 1, "eval_iters": 2, "lr": 0.1}
    found = []
    for flag in ({}, {"no_create_attention_mask_in_dataloader": True}):
        ranks = hot_run(["1,1,1"], [32, 0], **options, **flag)
        values = re.findall(r"validation loss at .*lm loss value: (\S+)", ranks[0].stdout)
        found.append([float(value) for value in values])
    assert len(found[0]) >= 2 and len(set(found[0])) > 1
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("skips", [None, True], ids=["training", "no training"])
def test_validation_with_parts_of_rows_has_the_losses_of_validation_with_whole_ones(tmp_path, skips):
    file = tmp_path / "strategies.yaml"
    options = {"train_iters": 2, "eval_interval": 1, "eval_iters": 2, "lr": 0.01, "skip_train": skips}
    found = []
    for home in ("{dp: 2, tp: 1, pp: 1}", "{dp: 1, tp: 1, pp: 1, cp: 2}"):
        file.write_text(f"bucket_sizes: [32, 0]\nstrategies: [{home}]\n")
        ranks = run_pretrain(toy_gpt(COMMON, options, hot_switch_strategy_file=str(file)), 2, before=same_weights)
        values = re.findall(r"validation loss at .*lm loss value: (\S+)", ranks[-1].stdout)
        found.append([float(value) for value in values])
    assert len(found[0]) >= (1 if skips else 2)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert "--no-create-attention-mask-in-dataloader is set" in ranks[0].stdout
