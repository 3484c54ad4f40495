# SPDX-License-Identifier: Apache-2.0
"""Megatron computes with a converted checkpoint what transformers computes with the model."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_ext.convert.from_hf import from_hf
from megatron_ext.convert.to_hf import ToHf, to_hf
from tests.convert import models
from tests.support.pretrain import run_pretrain

TRAINING = shlex.split(
    "--micro-batch-size 1 --global-batch-size 2 --seq-length 20 --train-iters 1 --lr 0 --min-lr 0 --weight-decay 0 "
    "--transformer-impl local --no-gradient-accumulation-fusion --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 249 --eval-iters 0 --eval-interval 10 --moe-router-bias-update-rate 0 --attention-dropout 0 "
    "--hidden-dropout 0"
)
"""A step that changes nothing."""


def logits(model: list[Any], optimizer: Any, args: Any) -> torch.Tensor:
    """Return what the model says of `models.IDS`, all of the vocabulary's columns that this rank has."""
    model[0].eval()
    rows, length = models.IDS.shape
    positions = torch.arange(length).repeat(rows, 1)
    hidden = torch.ones(1, 1, length, length).tril() < 0.5
    with torch.no_grad():
        return model[0](models.IDS, positions, hidden).float().clone()


@pytest.mark.parametrize("name", models.MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path):
    made = from_hf(models.save(name, tmp_path / "model"), tmp_path / "checkpoint")
    (rank,) = run_pretrain([*made.flags, "--load", str(made.folder), *TRAINING], 1, probe=logits)
    # fp32 with sums in another order; a wrong epsilon, head or row shows from 1e-5 on.
    torch.testing.assert_close(rank.record.probe, models.logits(name), rtol=0, atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama, scaled, tied", "--tensor-model-parallel-size 2"),
        ("qwen3_moe, dense layer", "--expert-model-parallel-size 2"),
        ("olmoe", "--tensor-model-parallel-size 2 --sequence-parallel"),
    ],
)
def test_any_layout_loads_it_and_what_it_saves_comes_back(name: str, layout: str, tmp_path: Path):
    source = models.save(name, tmp_path / "model")
    made = from_hf(source, tmp_path / "checkpoint")
    folders = ["--load", str(made.folder), "--save", str(tmp_path / "run"), "--save-interval=1"]
    arguments = [*made.flags, *folders, *TRAINING, *layout.split()]
    ranks = run_pretrain(arguments, 2, probe=logits)
    found = [rank.record.probe for rank in ranks]
    whole = torch.cat(found, dim=-1) if "tensor" in layout else found[0]
    torch.testing.assert_close(whole, models.logits(name), rtol=0, atol=3e-6)
    to_hf(ToHf(source=tmp_path / "run", target=tmp_path / "back"))
    begun, ended = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert all(torch.equal(begun[key], ended[key]) for key in begun | ended)
