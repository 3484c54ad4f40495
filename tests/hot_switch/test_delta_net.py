# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers learn the same under all strategies: a row has one document.

They run on doubles of Transformer Engine and flash-linear-attention, whose kernels need a GPU.
"""

import pytest

from tests.hot_switch.runs import COMMON, assert_equal_except_for_rounding, assert_resumed, full_parameters, stock_run
from tests.support.presets import DELTA_NET, toy_gpt
from tests.support.pretrain import run_pretrain
from tests.support.transformer_engine import accept_transformer_engine

pytestmark = pytest.mark.usefixtures("double_of_transformer_engine")

STRATEGIES = """
bucket_sizes: [32, 24, 16, 8, 0]
strategies:
  - {dp: 2, tp: 2, pp: 1, sequence_parallel: true}
  - {dp: 4, tp: 1, pp: 1, micro_batch_size: 2}
  - {dp: 2, tp: 1, pp: 1, cp: 2}
  - {dp: 1, tp: 2, pp: 2, sequence_parallel: true, recompute: full}
"""
OPTIONS = {**DELTA_NET, "num_layers": 4, "linear_attention_freq": 2, "train_iters": 4}


def train(tmp_path, *before, **options):
    file = tmp_path / "strategies.yaml"
    file.write_text(STRATEGIES)
    command = toy_gpt(COMMON, OPTIONS, hot_switch_strategy_file=str(file), **options)
    return run_pretrain(command, 4, probe=full_parameters, before=(accept_transformer_engine, *before))


def test_hot_equals_static(tmp_path):
    hot = train(tmp_path, save=str(tmp_path), save_interval=2)
    stock = stock_run("2,2,1", accept_transformer_engine, **{"sequence_parallel": True, **OPTIONS})
    assert_equal_except_for_rounding(hot, stock)
    said = hot[0].stdout + hot[-1].stdout
    assert "--hot-switch-attention is padded: in a packed row Gated DeltaNet would carry its state" in said
    assert_resumed(train(tmp_path, load=str(tmp_path), ckpt_step=2), hot, after=2)
