# SPDX-License-Identifier: Apache-2.0
"""Every family: what transformers saved comes back bit for bit, by way of a checkpoint of Megatron's."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.convert import torch_dist_writer
from megatron_ext.convert.from_hf import from_hf
from megatron_ext.convert.hf_names import hf_tensors
from megatron_ext.convert.model_sources import is_checkpoint
from megatron_ext.convert.to_hf import ToHf, to_hf
from megatron_ext.errors import UserError
from tests.convert import models
from tests.convert.cut_off import Killed, kill_at


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a model's folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


BIAS = "e_score_correction_bias"
"""Of a name that Megatron keeps in fp32, whatever the parameters are."""


def same(one: Path, other: Path) -> bool:
    """Return whether two folders have the same tensors, bit for bit and of the same types."""
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name in [name for name in ours if name.endswith(BIAS)]:
        ours[name] = ours[name].float()
    return all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", models.MODELS)
def test_weights_come_back_bit_for_bit_and_mean_the_same(name: str, dtype: torch.dtype, tmp_path: Path):
    source = models.save(name, tmp_path / "model", dtype)
    from_hf(source, tmp_path / "checkpoint")
    made = to_hf(ToHf(source=tmp_path / "checkpoint", target=tmp_path / "back"))
    assert made.family.model_type == json.loads((source / "config.json").read_text())["model_type"]
    assert same(source, tmp_path / "back")
    if dtype == torch.float32:
        with torch.no_grad():
            found = models.loaded(tmp_path / "back")(models.IDS).logits
        torch.testing.assert_close(found, models.logits(name), rtol=0, atol=5e-6)


def test_the_families_have_the_tensors_that_transformers_saves(tmp_path: Path):
    """`hf_names.py` is compared with the files themselves, not with what the package reads of them."""
    from megatron_ext.convert.families import family_named, read_config

    for number, name in enumerate(models.MODELS):
        folder = models.save(name, tmp_path / str(number))
        config = json.loads((folder / "config.json").read_text())
        family = family_named(config["model_type"])
        ours = {
            tensor.name: tensor.shape for tensor in hf_tensors(read_config(family, config).shape(), family.names)
        }
        assert ours == {key: tuple(tensor.shape) for key, tensor in weights(folder).items()}, name


def test_weights_of_several_types_are_not_rounded_without_a_word(tmp_path: Path):
    model = models.make("qwen3_moe", torch.bfloat16)
    model.model.norm.float()
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"several types: bfloat16 .*, float32 \(model.norm.weight\); --dtype"):
        from_hf(tmp_path / "model", tmp_path / "checkpoint")
    from_hf(tmp_path / "model", tmp_path / "checkpoint", dtype=torch.float32)
    to_hf(ToHf(source=tmp_path / "checkpoint", target=tmp_path / "back"))
    back = weights(tmp_path / "back")
    assert all(torch.equal(values.float(), back[name]) for name, values in weights(tmp_path / "model").items())


def test_files_of_several_shards_are_read_and_written(tmp_path: Path):
    source = models.save("mixtral", tmp_path / "model", max_shard_size="100KB")
    assert len(list(source.glob("*.safetensors"))) > 3
    from_hf(source, tmp_path / "checkpoint")
    to_hf(ToHf(source=tmp_path / "checkpoint", target=tmp_path / "back", max_shard_bytes=150_000))
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert same(source, tmp_path / "back")
    assert models.loaded(tmp_path / "back").config.num_local_experts == 4


def test_a_conversion_that_was_cut_off_resumes_after_the_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = models.save("llama", tmp_path / "model")
    from_hf(source, tmp_path / "checkpoint")
    task = ToHf(source=tmp_path / "checkpoint", target=tmp_path / "back", max_shard_bytes=60_000)
    seen: list[str] = []

    def cut_off(name: str, nbytes: int) -> None:
        seen.append(name)
        if len(seen) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        to_hf(task, cut_off)
    assert not (tmp_path / "back").exists()
    whole = weights(tmp_path / "back.partial")
    rest: list[str] = []
    to_hf(task, lambda name, nbytes: rest.append(name))
    assert whole and not whole.keys() & set(rest)
    assert same(source, tmp_path / "back") and not (tmp_path / "back.partial").exists()


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of tiny models has several files."""
    monkeypatch.setattr(torch_dist_writer, "FILE_BYTES", 60_000)


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder but `.metadata`, in which torch writes a random number."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != ".metadata"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.usefixtures("small_files")
def test_a_way_to_megatron_that_was_cut_off_resumes_after_the_whole_files(tmp_path: Path):
    source = models.save("llama", tmp_path / "model")
    from_hf(source, tmp_path / "whole")
    with pytest.raises(Killed):
        from_hf(source, tmp_path / "checkpoint", step=kill_at(14))
    partial = tmp_path / "checkpoint.partial"
    assert not (tmp_path / "checkpoint").exists()
    assert not is_checkpoint(partial) and not is_checkpoint(partial / "release")
    last = max(partial.glob("release/*.distcp"), key=lambda file: int(file.name.split("_")[2]))
    last.write_bytes(last.read_bytes()[:-100])  # a kill may leave less than an exception does
    rest: list[str] = []
    from_hf(source, tmp_path / "checkpoint", step=lambda name, nbytes: rest.append(name))
    assert "embedding.word_embeddings.weight" not in rest and "output_layer.weight" in rest
    assert contents(tmp_path / "checkpoint") == contents(tmp_path / "whole") and not partial.exists()
    to_hf(ToHf(source=tmp_path / "checkpoint", target=tmp_path / "back"))
    assert same(source, tmp_path / "back")


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("change", ["dtype", "weights"])
def test_files_of_another_model_or_type_are_not_resumed(change: str, tmp_path: Path):
    source = models.save("llama", tmp_path / "model")
    with pytest.raises(Killed):
        former = torch.bfloat16 if change == "dtype" else None
        from_hf(source, tmp_path / "checkpoint", dtype=former, step=kill_at(14))
    if change == "weights":
        file = source / "model.safetensors"
        save_file({name: values + 1 for name, values in load_file(file).items()}, file, metadata={"format": "pt"})
    from_hf(source, tmp_path / "checkpoint")
    to_hf(ToHf(source=tmp_path / "checkpoint", target=tmp_path / "back"))
    assert same(source, tmp_path / "back")


def test_files_of_another_task_are_not_resumed(tmp_path: Path):
    source = models.save("llama", tmp_path / "model")
    from_hf(source, tmp_path / "checkpoint")

    def cut_off(name: str, nbytes: int) -> None:
        if name.startswith("model.layers.1."):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        to_hf(
            ToHf(
                source=tmp_path / "checkpoint",
                target=tmp_path / "back",
                dtype=torch.bfloat16,
                max_shard_bytes=60_000,
            ),
            cut_off,
        )
    to_hf(ToHf(source=tmp_path / "checkpoint", target=tmp_path / "back", max_shard_bytes=60_000))
    assert same(source, tmp_path / "back")


def test_the_vocabulary_is_padded_with_zeros_and_the_padding_left_out_again(tmp_path: Path):
    source = models.save("qwen3", tmp_path / "model")
    made = from_hf(source, tmp_path / "checkpoint", divisor=64)
    assert made.flags[-2:] == ("--padded-vocab-size", "256")
    back = to_hf(ToHf(source=tmp_path / "checkpoint", target=tmp_path / "back"))
    assert back.padding == 6 and same(source, tmp_path / "back")
    whole = to_hf(ToHf(source=tmp_path / "checkpoint", target=tmp_path / "whole", vocab_size=256))
    assert whole.padding == 0
    assert not weights(tmp_path / "whole")["lm_head.weight"][250:].any()


def test_the_type_of_the_weights_can_be_chosen(tmp_path: Path):
    source = models.save("deepseek_v3", tmp_path / "model")
    from_hf(source, tmp_path / "checkpoint", dtype=torch.bfloat16)
    to_hf(ToHf(source=tmp_path / "checkpoint", target=tmp_path / "back", dtype=torch.float32))
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights(source).items()}
    back = weights(tmp_path / "back")
    # Megatron keeps the balancing bias in fp32 whatever the parameters are.
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(back.pop(bias), weights(source)[bias]) and rounded.pop(bias) is not None
    assert all(torch.equal(back[name], rounded[name]) for name in rounded)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("truncated", "not a whole safetensors file"),
        ("missing shard", "the file is missing"),
        ("no weights", "safe_serialization=True"),
        ("tensor missing", "lacks model.norm.weight"),
        ("another family", "model_type is 'gpt2'"),
        ("wrong family", "has no counterpart in Megatron"),
        ("wrong size", "config.json says"),
        ("unknown field", "no_such_field"),
        ("no config", "config.json"),
        ("weight_map []", "weight_map does not say which tensor is in which file"),
        ('weight_map {"a":5}', "weight_map does not say which tensor is in which file"),
    ],
)
def test_a_bad_model_is_refused_by_name_and_nothing_is_written(harm: str, said: str, tmp_path: Path):
    source = models.save("llama", tmp_path / "model", max_shard_size="100KB")
    config = json.loads((source / "config.json").read_text())
    shard = source / "model-00002-of-00006.safetensors"
    shard = shard if shard.exists() else sorted(source.glob("model-*"))[1]
    if harm == "truncated":
        shard.write_bytes(shard.read_bytes()[:-10])
    elif harm == "missing shard":
        shard.unlink()
    elif harm == "no weights":
        for file in source.glob("model*"):
            file.unlink()
    elif harm == "tensor missing":
        index = source / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        del content["weight_map"]["model.norm.weight"]
        index.write_text(json.dumps(content))
    elif harm.startswith("weight_map"):
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": json.loads(harm.split()[1])}))
    elif harm == "no config":
        (source / "config.json").unlink()
    changes = {
        "another family": {"model_type": "gpt2"},
        "wrong family": {"model_type": "qwen2"},
        "wrong size": {"hidden_size": 128},
        "unknown field": {"no_such_field": 3},
    }
    if harm in changes:
        (source / "config.json").write_text(json.dumps({**config, **changes[harm]}))
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        from_hf(source, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def test_ignoring_leaves_out_what_is_not_needed_and_something_at_all(tmp_path: Path):
    source = models.save("llama", tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "no_such_field": 3}))
    file = source / "model.safetensors"
    save_file({**load_file(file), "model.rotary.inv_freq": torch.ones(4)}, file, metadata={"format": "pt"})
    both = ["no_such_field", "*.inv_freq"]
    for name, said in [
        ("no_such_tensor", "leaves nothing out: no field of config.json has this name, and no tensor's name fits it"),
        ("hidden_size", "leaves nothing out: the conversion reads this field of config.json"),
        ("use_cache", "it has no meaning for the model anyway"),
        ("model.norm.weight", "the model needs model.norm.weight"),
        ("model.layers.1.*", "the model needs model.layers.1.input_layernorm.weight"),
    ]:
        with pytest.raises(UserError, match=re.escape(f"--ignore {name}") + ".*" + re.escape(said)):
            from_hf(source, tmp_path / "checkpoint", ignored=[*both, name])
    from_hf(source, tmp_path / "checkpoint", ignored=both)


def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path):
    source = models.save("llama", tmp_path / "model")
    from_hf(source, tmp_path / "checkpoint")
    with pytest.raises(UserError, match="--overwrite"):
        from_hf(source, tmp_path / "checkpoint")
    from_hf(models.save("qwen3", tmp_path / "other"), tmp_path / "checkpoint", overwrite=True)
    to_hf(ToHf(source=tmp_path / "checkpoint", target=tmp_path / "back"))
    assert same(tmp_path / "other", tmp_path / "back")
    assert not list(tmp_path.glob("*.former")) and not list(tmp_path.glob("*.partial"))
