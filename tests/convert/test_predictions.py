# SPDX-License-Identifier: Apache-2.0
"""Layers of multi-token prediction: left out only when that is said, and the same function in both layouts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.convert.families import family_for, family_named, read_config
from megatron_ext.convert.flags import settings_of
from megatron_ext.convert.from_hf import from_hf
from megatron_ext.convert.megatron_args import checkpoint_args
from megatron_ext.convert.to_hf import ToHf, to_hf
from megatron_ext.errors import UserError
from tests.convert import models
from tests.convert.families.test_configs import CONFIGS
from tests.convert.test_logits import TRAINING
from tests.support.pretrain import run_pretrain

LAYER = "model.layers.2."
"""After the two of the decoder."""


def save(folder: Path, change: Callable[[dict[str, torch.Tensor]], None] = lambda weights: None) -> Path:
    """Save a model of DeepSeek V3's layout with a layer of multi-token prediction."""
    models.save("deepseek_v3", folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in weights if name.startswith("model.layers.1.")]:
        noise = torch.randn(weights[name].shape, generator=generator)
        weights[name.replace("model.layers.1.", LAYER)] = weights[name] + 0.02 * noise
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{LAYER}{norm}.weight"] = 1 + 0.3 * torch.randn(64, generator=generator)
    weights[f"{LAYER}eh_proj.weight"] = 0.06 * torch.randn(64, 128, generator=generator)
    weights[f"{LAYER}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{LAYER}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return folder


def prediction(model: list[Any], optimizer: Any, args: Any) -> dict[str, torch.Tensor]:
    """Return what goes into the layer of multi-token prediction for `models.IDS`, and what comes out of it."""
    model[0].eval()
    rows, length = models.IDS.shape
    found: dict[str, torch.Tensor] = {}
    (layer,) = (module for module in model[0].modules() if type(module).__name__ == "MultiTokenPredictionLayer")
    layer.enorm.register_forward_pre_hook(lambda module, inputs: found.update(embedded=inputs[0].detach().clone()))
    layer.hnorm.register_forward_pre_hook(lambda module, inputs: found.update(hidden=inputs[0].detach().clone()))
    layer.final_layernorm.register_forward_hook(
        lambda module, inputs, output: found.update(out=output.detach().clone())
    )
    positions = torch.arange(length).repeat(rows, 1)
    hidden = torch.ones(1, 1, length, length).tril() < 0.5
    with torch.no_grad():
        model[0](models.IDS, positions, hidden)
    return {name: tensor.transpose(0, 1).float() for name, tensor in found.items()}


def by_transformers(folder: Path, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return what DeepSeek's formula gives, with transformers' layer."""
    from transformers import AutoModelForCausalLM

    weights = load_file(folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=3).eval().model
    norm = model.norm

    def normed(values: torch.Tensor, name: str) -> torch.Tensor:
        norm.weight.copy_(weights[f"{LAYER}{name}.weight"])
        return norm(values)

    rows, length = models.IDS.shape
    positions = torch.arange(length).repeat(rows, 1)
    mask = torch.full((length, length), float("-inf")).triu(1).expand(rows, 1, length, length)
    with torch.no_grad():
        both = torch.cat([normed(embedded, "enorm"), normed(hidden, "hnorm")], dim=-1)
        values = both @ weights[f"{LAYER}eh_proj.weight"].T
        turned = model.rotary_emb(values, positions)
        out = model.layers[2](values, attention_mask=mask, position_ids=positions, position_embeddings=turned)
        return normed(out[0] if isinstance(out, tuple) else out, "shared_head.norm")


def test_the_layer_computes_what_deepseeks_does_and_comes_back_bit_for_bit(tmp_path: Path):
    source = save(tmp_path / "model")
    made = from_hf(source, tmp_path / "checkpoint", mtp=True)
    assert made.flags[made.flags.index("--mtp-num-layers") + 1] == "1"
    folders = ["--load", str(made.folder), "--save", str(tmp_path / "run"), "--save-interval=1"]
    (rank,) = run_pretrain([*made.flags, *folders, *TRAINING], 1, probe=prediction)
    found = rank.record.probe
    torch.testing.assert_close(
        found["out"], by_transformers(source, found["embedded"], found["hidden"]), rtol=0, atol=3e-6
    )
    to_hf(ToHf(source=tmp_path / "run", target=tmp_path / "back"))
    begun, ended = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert all(torch.equal(begun[name], ended[name]) for name in begun | ended)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_the_layer_is_left_out_only_when_that_is_said(tmp_path: Path):
    source = save(tmp_path / "model")
    with pytest.raises(UserError, match=r"model\.layers\.2\..*--mtp takes layers.*--ignore PATTERN"):
        from_hf(source, tmp_path / "checkpoint")
    from_hf(source, tmp_path / "without", ignored=[f"{LAYER}*"])
    from_hf(source, tmp_path / "checkpoint", mtp=True)
    for config in (None, source):
        options = {"source": tmp_path / "checkpoint", "config": config, "overwrite": True}
        to_hf(ToHf(target=tmp_path / "back", **options))
        whole = load_file(tmp_path / "back" / "model.safetensors")
        to_hf(ToHf(target=tmp_path / "dropped", drop_mtp=True, **options))
        begun, ended = load_file(source / "model.safetensors"), load_file(tmp_path / "dropped" / "model.safetensors")
        assert begun.keys() == whole.keys()
        assert ended.keys() == {name for name in begun if not name.startswith(LAYER)}
        assert json.loads((tmp_path / "dropped" / "config.json").read_text())["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_a_family_without_a_place_for_it_says_so(name: str):
    args = checkpoint_args(read_config(family_named(name), CONFIGS[name]), 300)
    args.mtp_num_layers = 1
    with pytest.raises(UserError, match=f"a {name} model cannot be.*mtp_num_layers is 1.*--drop-mtp"):
        family_for(settings_of(args))


def test_models_that_have_no_such_layer_or_another_head_in_it_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="--mtp: a llama model has no layers"):
        from_hf(models.save("llama", tmp_path / "llama"), tmp_path / "checkpoint", mtp=True)
    with pytest.raises(UserError, match=r"lacks model\.layers\.2\.enorm\.weight"):
        from_hf(models.save("deepseek_v3", tmp_path / "plain"), tmp_path / "checkpoint", mtp=True)
    other = save(tmp_path / "other", lambda weights: weights[f"{LAYER}shared_head.head.weight"].add_(1))
    with pytest.raises(UserError, match=r"shared_head\.head\.weight is not equal to lm_head\.weight"):
        from_hf(other, tmp_path / "checkpoint", mtp=True)
    assert not (tmp_path / "checkpoint").exists()
