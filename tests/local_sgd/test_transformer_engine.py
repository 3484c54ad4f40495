# SPDX-License-Identifier: Apache-2.0
"""Local SGD on Megatron's Transformer Engine layers, on a double of that package: the real one needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hot_switch.runs import LLAMA, assert_equal_except_for_rounding, full_parameters
from tests.local_sgd.runs import arguments, same_state
from tests.support.every_run import one_of_each
from tests.support.presets import GROUPED
from tests.support.pretrain import run_pretrain
from tests.support.transformer_engine import accept_transformer_engine

pytestmark = pytest.mark.usefixtures("double_of_transformer_engine")

# The norms by which workers are weighted and left out are those of layers, whose norms have other names here.
PENALTY = {
    "train_iters": 10,
    "lr": 1e-3,
    "local_sgd_warmup_steps": 2,
    "local_sgd_sync_interval": 2,
    "local_sgd_skip_anomaly": True,
    "local_sgd_ewma_warmup_steps": 2,
    "local_sgd_pseudo_gradnorm_reduce": True,
    "local_sgd_clip_pseudo_grad": 0.1,
}


def test_rounds_over_these_layers_equal_rounds_over_local_ones():
    def run(layers):
        command = arguments("tp2-sp", "fp32-distopt", workers=2, **PENALTY, **LLAMA, transformer_impl=layers)
        return run_pretrain(command, 4, before=accept_transformer_engine, probe=full_parameters)

    ours = run("transformer_engine")
    assert len(set(ours[-1].losses)) == 10
    assert_equal_except_for_rounding(ours, run("local"))


@pytest.mark.parametrize(
    ("layout", "options"), one_of_each([("tp2", LLAMA), ("moe-ep2", GROUPED)], {1}), ids=["dense", "grouped"]
)
def test_a_run_resumes_with_the_same_bits_in_the_middle_of_an_interval(tmp_path: Path, layout, options):
    options = {**options, **PENALTY, "transformer_impl": "transformer_engine", "hidden_dropout": 0.1}

    def run(**where):
        command = arguments(layout, "bf16-distopt", workers=2, **options, **where)
        return run_pretrain(command, 4, before=accept_transformer_engine)

    through = run(save=str(tmp_path), save_interval=5)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    resumed = run(load=str(tmp_path))
    assert [rank.losses[5:] for rank in through] == [rank.losses for rank in resumed]
    assert same_state(through, resumed)
