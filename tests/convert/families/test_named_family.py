# SPDX-License-Identifier: Apache-2.0
"""A model that is not of the family that its ``config.json`` names is told which one it fits."""

import json
from pathlib import Path

import pytest

from megatron_ext.convert.from_hf import from_hf
from megatron_ext.errors import UserError
from tests.convert import models


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("mixtral", "qwen3_moe"),
        ("qwen3_moe", "mixtral"),
        ("qwen2", "llama"),
        ("qwen3", "qwen2"),
        ("deepseek_v2", "deepseek_v3"),
    ],
)
def test_a_model_that_is_called_by_another_familys_name_is_told_its_own(name: str, called: str, tmp_path: Path):
    source = models.save(name, tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": called}))
    with pytest.raises(UserError, match=f"; all of its fields and tensors fit model_type '{name}'$"):
        from_hf(source, tmp_path / "start")


def test_a_model_that_fits_no_family_is_told_of_none(tmp_path: Path):
    source = models.save("mixtral", tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_moe", "sliding_window": 64}))
    with pytest.raises(UserError) as refused:
        from_hf(source, tmp_path / "start")
    assert "fit model_type" not in str(refused.value)
