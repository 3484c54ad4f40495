# SPDX-License-Identifier: Apache-2.0
"""No weight changes its type, or its value beyond rounding, without a word."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.cli.main import main
from megatron_ext.convert.dtypes import fitting
from megatron_ext.convert.from_hf import from_hf
from megatron_ext.errors import UserError
from tests.convert import models


def test_weights_of_a_type_that_megatron_does_not_train_in_need_a_dtype(tmp_path: Path):
    source = models.save("llama", tmp_path / "model", torch.float64)
    with pytest.raises(UserError, match=r"model: the weights are float64; choose one of fp32, bf16, fp16 .* --dtype"):
        from_hf(source, tmp_path / "checkpoint")
    assert from_hf(source, tmp_path / "checkpoint", dtype=torch.float32).dtype == torch.float32


def test_a_finite_value_does_not_become_infinite(tmp_path: Path):
    source = models.save("llama", tmp_path / "model")
    file = source / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][3] = 1e6
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model.norm.weight: has values beyond 6.55e\+04, .* choose another --dtype"):
        from_hf(source, tmp_path / "checkpoint", dtype=torch.float16)
    from_hf(source, tmp_path / "checkpoint", dtype=torch.bfloat16)
    odd = torch.tensor([torch.inf, torch.nan, 1.0])
    torch.testing.assert_close(fitting(odd, torch.float16, "x"), odd.half(), equal_nan=True)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_configuration_that_says_another_type_than_the_source_is_told(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = models.save("llama", tmp_path / "model")
    start = from_hf(source, tmp_path / "start").folder
    config = json.loads((source / "config.json").read_text())
    config = {name: value for name, value in config.items() if "dtype" not in name}
    (tmp_path / "config.json").write_text(json.dumps({**config, key: "bfloat16"}))
    words = ["convert", "to-hf", str(start), "--hf-config", str(tmp_path / "config.json")]
    assert main([*words, str(tmp_path / "plain")]) == 0
    assert "the configuration says bfloat16, which --dtype can choose" in capsys.readouterr().out
    assert main([*words, str(tmp_path / "rounded"), "--dtype", "bf16"]) == 0
    assert "the configuration says" not in capsys.readouterr().out
    for folder, dtype in (("plain", torch.float32), ("rounded", torch.bfloat16)):
        assert models.loaded(tmp_path / folder).dtype == dtype
