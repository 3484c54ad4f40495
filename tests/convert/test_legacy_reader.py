# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the legacy format, a file per rank, become Hugging Face models of the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_ext.convert.from_hf import from_hf
from megatron_ext.convert.megatron_args import checkpoint_args
from megatron_ext.convert.to_hf import ToHf, to_hf
from megatron_ext.convert.torch_dist_reader import TorchDistReader
from megatron_ext.convert.upcycle import upcycle
from megatron_ext.convert.upcycle_config import UpcycleConfig
from megatron_ext.errors import UserError
from megatron_ext.params import Coordinates, Layout, Placement, gpt_parameters, scatter
from tests.convert import models
from tests.convert.test_logits import TRAINING, logits
from tests.support.pretrain import run_pretrain


def back(source: Path, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint."""
    to_hf(ToHf(source=source, target=folder, overwrite=True, **options))
    return load_file(folder / "model.safetensors")


def test_what_megatron_saves_in_the_legacy_format_is_the_model_that_it_had(tmp_path: Path):
    made = from_hf(models.save("qwen3_moe", tmp_path / "model"), tmp_path / "checkpoint", divisor=4)
    folders = ["--save", str(tmp_path / "run"), "--save-interval=1", "--ckpt-format=torch"]
    ranks = run_pretrain([*made.flags, *folders, *TRAINING, "--expert-model-parallel-size=2"], 2, probe=logits)
    back(tmp_path / "run", tmp_path / "back", vocab_size=models.ROWS)
    with torch.no_grad():
        found = models.loaded(tmp_path / "back")(models.IDS).logits
    whole = ranks[0].record.probe[..., : models.ROWS]
    torch.testing.assert_close(found, whole, rtol=0, atol=3e-6)


def written(name: str, tmp_path: Path, layout: Layout, **arguments: Any) -> tuple[dict[str, torch.Tensor], Path]:
    """Write a model as the ranks of a layout would; return its weights, and the folder."""
    source = models.save(name, tmp_path / "model")
    made = from_hf(source, tmp_path / "checkpoint")
    reader = TorchDistReader(made.folder / "release")
    shape = made.settings.shape()
    values = {tensor.name: reader.read(tensor.name) for tensor in gpt_parameters(shape)}
    args = checkpoint_args(made.settings, shape.padded_vocab_size)
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = layout.tp, layout.pp
    args.expert_model_parallel_size, args.transformer_impl = layout.ep, "local"
    for field, value in arguments.items():
        setattr(args, field, value)
    placement = Placement(shape, layout)
    folder = tmp_path / "run" / "iter_0000005"
    for tensor, stage, expert in [
        (tensor, stage, expert)
        for tensor in range(layout.tp)
        for stage in range(layout.pp)
        for expert in range(layout.ep)
    ]:
        held = placement.on(Coordinates(tp=tensor, etp=tensor, pp=stage, ep=expert))
        state: dict[str, Any] = {"args": args}
        for chunk in range(layout.vpp):
            first = placement.chunk_layers[chunk * layout.pp + stage].start
            local = scatter(values, [placed for placed in held if placed.chunk == chunk])
            state["model" if layout.vpp == 1 else f"model{chunk}"] = {
                local_name(key, first, expert * placement.experts_per_rank): value for key, value in local.items()
            }
        ranks = f"_{stage:03d}" * (layout.pp > 1) + f"_{expert:03d}" * (layout.ep > 1)
        path = folder / f"mp_rank_{tensor:02d}{ranks}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(state, path)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    return load_file(source / "model.safetensors"), tmp_path / "run"


def local_name(name: str, first_layer: int, first_expert: int) -> str:
    """Return what a rank with the local layers calls a tensor."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) - first_layer)
        if parts[3:5] == ["mlp", "experts"]:
            parts[5:6] = ["local_experts", str(int(parts[5]) - first_expert)]
    return ".".join(parts)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_moe, dense layer", Layout(tp=2, ep=2, dp=2)),
        ("deepseek_v3", Layout(pp=2, layers_per_chunk=(0, 2))),
        ("llama, scaled, tied", Layout(pp=2, vpp=2, layers_per_chunk=(0, 1, 0, 1))),
        ("deepseek_v3", Layout(tp=2)),
    ],
)
def test_every_layout_comes_back_bit_for_bit(name: str, layout: Layout, tmp_path: Path):
    begun, run = written(name, tmp_path, layout)
    ended = back(run, tmp_path / "back")
    assert begun.keys() == ended.keys() and all(torch.equal(begun[key], ended[key]) for key in begun)


def test_what_is_missing_or_does_not_fit_is_named(tmp_path: Path):
    _, run = written("qwen3_moe", tmp_path, Layout(tp=2, ep=2, dp=2))
    folder = run / "iter_0000005"
    with pytest.raises(UserError, match="--weights anchor chooses in torch_dist checkpoints; load this one without"):
        back(run, tmp_path / "back", weights="anchor")
    with pytest.raises(UserError, match=r"those in .*run: iter_0000005"):
        back(run, tmp_path / "back", iteration=4)
    with pytest.raises(UserError, match="in the legacy format; load it without --ckpt-format torch"):
        upcycle(run, tmp_path / "mixture", UpcycleConfig())
    file = folder / "mp_rank_01_001" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    key = "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight"
    values = state["model"].pop(key)
    torch.save(state, file)
    with pytest.raises(UserError, match=r"mp_rank_01_001.*mlp\.experts\.3\.linear_fc1\.weight: the file lacks"):
        back(run, tmp_path / "back")
    torch.save({**state, "model": {**state["model"], key: values[1:]}}, file)
    with pytest.raises(UserError, match="has a part of shape"):
        back(run, tmp_path / "back")
    torch.save({**state, "model": {**state["model"], key: values, "decoder.layers.1.new": values}}, file)
    with pytest.raises(UserError, match=r"the source has decoder\.layers\.1\.new"):
        back(run, tmp_path / "back")
    torch.save({"args": state["args"]}, file)
    with pytest.raises(UserError, match="in the middle of an interval of local SGD"):
        back(run, tmp_path / "back")
    file.unlink()
    with pytest.raises(UserError, match=r"mp_rank_01_001.*missing"):
        back(run, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_an_iteration_whose_rank_files_are_gone_is_still_one_in_the_legacy_format(tmp_path: Path):
    (tmp_path / "mp_rank_00").mkdir()
    with pytest.raises(UserError, match=r"mp_rank_00/model_optim_rng\.pt: the checkpoint's file is missing"):
        back(tmp_path, tmp_path / "back")
