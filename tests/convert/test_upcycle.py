# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts that starts as the dense model it was made of."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_ext.convert.families import family_named, read_config
from megatron_ext.convert.from_hf import from_hf
from megatron_ext.convert.to_hf import ToHf, to_hf
from megatron_ext.convert.torch_dist_reader import TorchDistReader
from megatron_ext.convert.upcycle import upcycle
from megatron_ext.convert.upcycle_config import UpcycleConfig
from megatron_ext.errors import UserError
from tests.convert import models
from tests.convert.families.test_configs import CONFIGS
from tests.convert.test_logits import TRAINING, logits
from tests.support.pretrain import run_pretrain

LAYER = "model.layers.1.mlp."


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a dense model."""
    folder = tmp_path_factory.mktemp("dense")
    source = models.save("qwen3", folder / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    from_hf(source, folder / "checkpoint")
    return folder / "checkpoint"


def mixture(dense: Path, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a mixture as Hugging Face's layout has them."""
    upcycle(dense, folder / "mixture", UpcycleConfig(**options))
    to_hf(ToHf(source=folder / "mixture", target=folder / "hf", config=folder / "mixture"))
    return load_file(folder / "hf" / "model.safetensors")


def of_dense(dense: Path) -> dict[str, torch.Tensor]:
    """Return the dense model's weights."""
    return load_file(dense.parent / "model" / "model.safetensors")


@pytest.mark.parametrize("router", ["normal", "zeros", "mlp"])
def test_copies_compute_what_the_dense_model_does(router: Any, dense: Path, tmp_path: Path):
    mixture(dense, tmp_path, num_experts=4, router_init=router)
    with torch.no_grad():
        found = models.loaded(tmp_path / "hf")(models.IDS).logits
    torch.testing.assert_close(found, models.logits("qwen3"), rtol=0, atol=5e-6)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["num_experts"], config["eos_token_id"]) == ("qwen3_moe", 4, 7)


def test_megatron_begins_at_the_dense_models_logits(dense: Path, tmp_path: Path):
    made = upcycle(dense, tmp_path / "mixture", UpcycleConfig(num_experts=4))
    (rank,) = run_pretrain([*made.flags, "--load", str(made.folder), *TRAINING], 1, probe=logits)
    torch.testing.assert_close(rank.record.probe, models.logits("qwen3"), rtol=0, atol=3e-6)
    assert made.flags[made.flags.index("--moe-aux-loss-coeff") + 1] == "0.001"


def test_slices_are_the_dense_mlp_in_turn_and_sum_to_it(dense: Path, tmp_path: Path):
    weights, whole = mixture(
        dense, tmp_path, num_experts=2, topk=2, granularity=2, router_init="zeros"
    ), of_dense(dense)
    for name, axis, scale in (("gate_proj", 0, 1), ("up_proj", 0, 1), ("down_proj", 1, 2)):
        for copy in (0, 1):
            slices = [weights[f"{LAYER}experts.{2 * copy + part}.{name}.weight"] for part in (0, 1)]
            assert torch.equal(torch.cat(slices, dim=axis), scale * whole[f"{LAYER}{name}.weight"])
    # Every token is given to all four with equal weights.
    with torch.no_grad():
        found = models.loaded(tmp_path / "hf")(models.IDS).logits
    torch.testing.assert_close(found, models.logits("qwen3"), rtol=0, atol=5e-6)


def test_an_output_layer_of_its_own_begins_as_the_embedding(tmp_path: Path):
    start = from_hf(models.save("llama, scaled, tied", tmp_path / "model"), tmp_path / "start").folder
    tied = upcycle(start, tmp_path / "tied", UpcycleConfig())
    made = upcycle(start, tmp_path / "mixture", UpcycleConfig(untie_embeddings=True))
    assert "--untie-embeddings-and-output-weights" in {*made.flags} - {*tied.flags}
    reader = TorchDistReader(made.folder / "release")
    output, embedding = (reader.read(name) for name in ("output_layer.weight", "embedding.word_embeddings.weight"))
    assert torch.equal(output, embedding)


def test_noise_is_added_to_a_part_of_the_weights_and_is_the_same_every_time(dense: Path, tmp_path: Path):
    options = {"num_experts": 3, "noise_std": 0.5, "noise_fraction": 0.25}
    weights, whole = mixture(dense, tmp_path / "one", **options), of_dense(dense)
    again = mixture(dense, tmp_path / "two", **options)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    noise = [
        weights[f"{LAYER}experts.{expert}.up_proj.weight"] - whole[f"{LAYER}up_proj.weight"] for expert in range(3)
    ]
    for values in noise:
        assert (values != 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
        assert values[values != 0].std().item() == pytest.approx(0.5, abs=0.03)
    assert not torch.equal(noise[0], noise[1])
    other = mixture(dense, tmp_path / "three", **options, seed=1)
    assert not torch.equal(other[f"{LAYER}gate.weight"], weights[f"{LAYER}gate.weight"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topk": 9}, "--topk 9: there are 8 copies"),
        ({"num_experts": 0}, "--num-experts 0"),
        ({"granularity": 5}, "--granularity 5 does not divide the MLP's width 96"),
        ({"noise_std": -1.0}, "--noise-std -1.0"),
        ({"noise_std": math.nan}, "--noise-std nan: give a finite number of 0 or more"),
        ({"noise_std": math.inf}, "--noise-std inf: give a finite number of 0 or more"),
        ({"router_std": math.nan}, "--router-std nan: give a finite number of 0 or more"),
        ({"aux_loss_coeff": math.nan}, "--aux-loss-coeff nan: give a finite number of 0 or more"),
        ({"noise_fraction": math.nan}, "--noise-fraction nan: give a number from 0 to 1"),
        ({"noise_fraction": 1.5}, "--noise-fraction 1.5"),
        ({"router_std": -1.0}, "--router-std -1.0"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(options: Any, said: str, dense: Path, tmp_path: Path):
    with pytest.raises(UserError) as refused:
        upcycle(dense, tmp_path / "mixture", UpcycleConfig(**options))
    assert said in str(refused.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "said"), [("mixtral", "has experts already (4)"), ("llama, biases", "linear layers have biases")]
)
def test_a_model_that_cannot_become_one_is_refused(name: str, said: str, tmp_path: Path):
    made = from_hf(models.save(name, tmp_path / "model"), tmp_path / "checkpoint")
    with pytest.raises(UserError) as refused:
        upcycle(made.folder, tmp_path / "mixture", UpcycleConfig())
    assert said in str(refused.value)


def test_a_model_with_multi_token_prediction_is_refused_with_the_way_out():
    dense = read_config(family_named("qwen3"), CONFIGS["qwen3"])
    UpcycleConfig().check(dense)
    with pytest.raises(UserError, match="convert to-hf --drop-mtp"):
        UpcycleConfig().check(replace(dense, mtp_num_layers=1))
