# SPDX-License-Identifier: Apache-2.0
"""Sliding windows (`--window-size`) of documents, and the positions of models with long contexts (yarn)."""

import pytest

from tests.hot_switch.runs import (
    COMMON,
    LLAMA,
    PARTS_OF_ROWS,
    assert_equal_except_for_rounding,
    full_parameters,
    hot_run,
    losses,
    many_rounds,
    stock_run,
)
from tests.support.presets import toy_gpt
from tests.support.pretrain import run_pretrain

HOT = {"hot_switch_strategies": ["1,2,2", "4,1,1"], "hot_switch_bucket_sizes": [32, 16, 0]}


@pytest.mark.parametrize(
    ("home", "options", "parts"),
    [
        # Every second layer has no window.
        pytest.param("1,2,2", {"window_size": "5,0", "window_attn_skip_freq": 2}, False, id="some layers"),
        pytest.param("2,1,2", {"window_size": "3,0"}, True, id="parts of rows", marks=pytest.mark.slow),
    ],
)
def test_strategies_attend_within_windows_of_documents(tmp_path, home, options, parts):
    options = {**LLAMA, **options, "num_layers": 4, "train_iters": 8, "use_distributed_optimizer": True}
    (tmp_path / "strategies.yaml").write_text(PARTS_OF_ROWS)
    ours = {"hot_switch_strategy_file": str(tmp_path / "strategies.yaml")} if parts else HOT
    hot = run_pretrain(toy_gpt(COMMON, options, ours), 4, probe=full_parameters, before=many_rounds)
    stock = stock_run(home, **options)
    assert_equal_except_for_rounding(hot, stock)
    everywhere = stock_run(home, **{**options, "window_size": None, "window_attn_skip_freq": None})
    assert hot[0].grad_norms[0] != pytest.approx(everywhere[0].grad_norms[0], rel=1e-3)


def test_strategies_keep_yarns_positions():
    yarn = {"position_embedding_type": "yarn", "yarn_original_max_position_embeddings": 8, "rotary_scaling_factor": 4.0}
    options = {**LLAMA, **yarn, "train_iters": 6, "use_distributed_optimizer": True}
    hot = hot_run(["1,2,1", "2,1,1", "1,1,2"], [32, 16, 8, 0], **options)
    stock = stock_run("1,2,1", **options)
    assert_equal_except_for_rounding(hot, stock)
    unscaled = stock_run("1,2,1", **{**LLAMA, "train_iters": 6, "use_distributed_optimizer": True})
    assert losses(unscaled)[0] != pytest.approx(losses(stock)[0], rel=0, abs=1e-5)
