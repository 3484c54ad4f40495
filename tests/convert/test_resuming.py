# SPDX-License-Identifier: Apache-2.0
"""A conversion that was cut off is resumed where it is the same one, and begun again where it is another."""

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megatron_ext.convert import whole_folder
from megatron_ext.convert.from_hf import from_hf
from megatron_ext.convert.to_hf import ToHf, to_hf
from megatron_ext.errors import UserError
from tests.convert import models
from tests.convert.cut_off import Killed, kill_at


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint made of a model, which is beside it."""
    folder = tmp_path_factory.mktemp("start")
    from_hf(models.save("llama", folder / "model"), folder / "start")
    return folder / "start"


def files(folder: Path) -> list[str]:
    """Return the names of all files in a folder."""
    return sorted(path.name for path in folder.iterdir())


def weight_map(folder: Path) -> dict[str, str]:
    """Return which file has which tensor, by the index of a model."""
    content: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return content


@pytest.mark.parametrize(
    ("before", "after", "same_number"), [(60_000, 65_000, True), (60_000, 100_000, False)], ids=["same number", "fewer"]
)
def test_files_of_another_size_are_not_taken_for_those_that_were_to_be_written(
    before: int, after: int, same_number: bool, start: Path, tmp_path: Path
):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    to_hf(ToHf(source=start, target=whole, max_shard_bytes=after))
    with pytest.raises(Killed):
        to_hf(ToHf(source=start, target=resumed, max_shard_bytes=before), kill_at(15))
    left = {path.name for path in (tmp_path / "resumed.partial").glob("*.safetensors")}
    assert left and bool(left & set(weight_map(whole).values())) == same_number
    to_hf(ToHf(source=start, target=resumed, max_shard_bytes=after))
    assert files(resumed) == files(whole) and weight_map(resumed) == weight_map(whole)
    for name in set(weight_map(whole).values()):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()


def test_a_tokenizer_of_a_conversion_that_was_cut_off_does_not_stay_beside_another(start: Path, tmp_path: Path):
    for name in ("vocab.json", "tokenizer.json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("{}")

    def task(tokenizer: str) -> ToHf:
        return ToHf(source=start, target=tmp_path / "out", tokenizer=tmp_path / tokenizer)

    def killed(folder: Path) -> list[str]:
        raise Killed

    with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_folder, "_files", killed)  # when everything is there, and not under its name yet
        to_hf(task("vocab.json"))
    assert "vocab.json" in files(tmp_path / "out.partial")
    to_hf(task("tokenizer.json"))
    assert "tokenizer.json" in files(tmp_path / "out") and "vocab.json" not in files(tmp_path / "out")


def test_what_a_kill_leaves_of_a_file_does_not_stay_in_the_model(start: Path, tmp_path: Path):
    def killed(tensors: object, path: Path, metadata: object) -> None:
        path.with_name(".tmpK1ll3d").write_text("half of the weights")  # as safetensors names what it writes
        raise Killed

    with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", killed)
        to_hf(ToHf(source=start, target=tmp_path / "out"))
    assert list((tmp_path / "out.partial").rglob(".tmp*"))
    to_hf(ToHf(source=start, target=tmp_path / "out"))
    assert {"model.safetensors", "conversion.json"} <= {*files(tmp_path / "out")}
    assert not [name for name in files(tmp_path / "out") if name.startswith((".tmp", "unfinished"))]


@pytest.mark.parametrize("harm", ["other tensors", "another shape", "not there", "besides", "damaged"])
def test_what_is_written_is_held_against_the_index(harm: str, start: Path, tmp_path: Path):
    task = ToHf(source=start, target=tmp_path / "out", max_shard_bytes=60_000)
    with pytest.raises(Killed):
        to_hf(task, kill_at(15))
    partial = tmp_path / "out.partial"
    first = min(partial.glob("*.safetensors"))
    content = load_file(first)
    if harm == "other tensors":
        content.popitem()
    elif harm == "another shape":
        content = {name: tensor[:1] for name, tensor in content.items()}
    if harm == "damaged":
        first.write_bytes(first.read_bytes()[:-4])
    elif harm == "besides":
        (partial / "model-00001-of-00099.safetensors").write_bytes(first.read_bytes())
    elif harm != "not there":
        save_file(content, first, metadata={"format": "pt"})

    def step(name: str, nbytes: int) -> None:
        first.unlink(missing_ok=harm == "not there")

    with pytest.raises(UserError, match=f"{partial}: model-.* remove it, and convert again"):
        to_hf(task, step if harm == "not there" else None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_all_files_have_the_mode_that_the_umask_leaves(mask: int, tmp_path: Path):
    model = models.save("llama", tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer.json").chmod(0o400)
    before = os.umask(mask)
    try:
        from_hf(model, tmp_path / "start")
        to_hf(ToHf(source=tmp_path / "start", target=tmp_path / "back"))
    finally:
        os.umask(before)
    found = [path for name in ("start", "back") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert {path.name for path in found} >= {"model.safetensors", "tokenizer.json"}
    assert {path.stat().st_mode & 0o777 for path in found} == {0o666 & ~mask}
