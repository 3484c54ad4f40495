# SPDX-License-Identifier: Apache-2.0
"""Local SGD on the kernels of Transformer Engine itself, which needs a GPU; the rest of it runs on a double."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hot_switch.runs import LLAMA
from tests.local_sgd.runs import arguments, model_digests, same_state, worker_slices
from tests.local_sgd.test_transformer_engine import PENALTY
from tests.support.presets import GROUPED
from tests.support.pretrain import run_pretrain

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("transformer_engine")]

KERNELS = {
    "transformer_impl": "transformer_engine",
    "attention_backend": "auto",
    "hidden_size": 128,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "deterministic_mode": True,
}


@pytest.mark.parametrize(("layout", "options"), [("tp2", LLAMA), ("moe-ep2", GROUPED)], ids=["dense", "grouped"])
def test_a_run_resumes_with_the_same_bits_in_the_middle_of_an_interval(tmp_path: Path, layout, options):
    def run(**where):
        command = arguments(layout, "bf16-distopt-overlap", workers=2, **options, **PENALTY, **KERNELS, **where)
        return run_pretrain(command, 4)

    through = run(save=str(tmp_path), save_interval=5)
    first, other = (model_digests(part) for part in worker_slices(through, layout, 2))
    assert first == other
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    resumed = run(load=str(tmp_path))
    assert [rank.losses[5:] for rank in through] == [rank.losses for rank in resumed]
    assert same_state(through, resumed)
