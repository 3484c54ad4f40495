# SPDX-License-Identifier: Apache-2.0
"""examples/pretrain_gpt.py says in one line what it does not read."""

import pytest

from tests.support.presets import Options, toy_gpt
from tests.support.pretrain import run_failing_pretrain

REFUSED: dict[str, tuple[Options, str]] = {
    "a loader of one's own": (
        {"dataloader_type": "external"},
        "--dataloader-type external: examples/pretrain_gpt.py builds datasets and no loader of its own; use single or",
    ),
    "middles to fill, on mock data": (
        {"fim_data": True},
        "arguments: Megatron refuses them: Mock dataset is not supported with FIM dataset.",
    ),
    "logits": ({"logits_load_dir": "folder"}, "--logits-load-dir: not known to examples/pretrain_gpt.py; run"),
}


@pytest.mark.parametrize("data", REFUSED)
def test_data_that_the_script_does_not_read_are_refused_before_anything_is_built(data: str):
    options, said = REFUSED[data]
    (exit_of_rank,) = run_failing_pretrain(toy_gpt(options), 1)
    assert said in exit_of_rank.stderr and "Traceback" not in exit_of_rank.stderr
