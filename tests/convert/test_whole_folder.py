# SPDX-License-Identifier: Apache-2.0
"""A conversion replaces what a conversion wrote, and nothing else."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from megatron_ext.cli.main import main
from megatron_ext.convert import whole_folder
from megatron_ext.convert.whole_folder import RECORD, resumed_folder
from megatron_ext.errors import UserError
from tests.convert import models

MINE = "months of work"


def convert(target: Path, text: str = "weights", *, overwrite: bool = True, **inputs: Path) -> None:
    """Write a folder of two files, one of them in a folder below."""
    with resumed_folder(target, {"text": text}, inputs=inputs, overwrite=overwrite) as folder:
        (folder / "below").mkdir(exist_ok=True)
        (folder / "below" / "weights").write_text(text)
        (folder / "config").write_text(text)


def contents(folder: Path) -> Mapping[str, str]:
    """Return all files below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_a_conversion_replaces_what_one_wrote_when_it_is_told_to(tmp_path: Path):
    convert(tmp_path / "out", "first")
    with pytest.raises(UserError, match="something is there already; choose another folder, or give --overwrite"):
        convert(tmp_path / "out", "second", overwrite=False)
    assert (tmp_path / "out" / "config").read_text() == "first"
    convert(tmp_path / "out", "second")
    assert (tmp_path / "out" / "below" / "weights").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def add_a_file(out: Path) -> None:
    """Do as somebody who keeps a file with a model, in a folder below."""
    convert(out)
    (out / "below" / "thesis.txt").write_text(MINE)


def add_an_empty_folder(out: Path) -> None:
    """Do as somebody who makes room."""
    convert(out)
    (out / "iter_0000100").mkdir()


def a_file(out: Path) -> None:
    """Do as somebody who keeps notes."""
    out.write_text(MINE)


def a_folder(out: Path) -> None:
    """Do as somebody whose model lies there."""
    out.mkdir()
    (out / "config.json").write_text(MINE)


def a_record_of_another(out: Path) -> None:
    """Do as somebody whose file has the record's name."""
    out.mkdir()
    (out / RECORD).write_text('{"files": ["thesis.txt"]}')
    (out / "thesis.txt").write_text(MINE)


FOREIGN = [add_a_file, add_an_empty_folder, a_file, a_folder, a_record_of_another]


@pytest.mark.parametrize("name", ["out", "out.partial", "out.former"])
@pytest.mark.parametrize("make", FOREIGN, ids=lambda make: make.__name__)
def test_what_no_conversion_wrote_stays_whatever_is_said(make: Callable[[Path], None], name: str, tmp_path: Path):
    make(tmp_path / name)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=f"{name}: something is there already, which not even --overwrite replaces: "):
        convert(tmp_path / "out")
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_output_that_is_or_holds_an_input_is_refused(tmp_path: Path):
    for folder in (tmp_path / "model", tmp_path / "model.partial", tmp_path / "model.former"):
        convert(folder)
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path / "model")
        for read in (folder, folder / "below"):
            for target in (tmp_path / "model", tmp_path / "link"):
                with pytest.raises(UserError, match=f"model.*: --hf-config is {read}, which would be replaced"):
                    convert(target, **{"--hf-config": read})
        assert (folder / "config").read_text() == "weights"
        shutil.rmtree(folder)


def test_an_output_may_lie_in_an_input(tmp_path: Path):
    a_folder(tmp_path / "run")
    convert(tmp_path / "run" / "100-hf", SOURCE=tmp_path / "run")
    convert(tmp_path / "run" / "100-hf", "again", SOURCE=tmp_path / "run")
    assert (tmp_path / "run" / "config.json").read_text() == MINE


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_came_there_in_the_meantime_stays(overwrite: bool, tmp_path: Path):
    with (
        pytest.raises(UserError, match="something is there already, which not even --overwrite replaces"),
        resumed_folder(tmp_path / "out", {}, inputs={}, overwrite=overwrite) as folder,
    ):
        (folder / "config").write_text("weights")
        a_folder(tmp_path / "out")
    assert contents(tmp_path / "out") == {"config.json": MINE}
    assert (tmp_path / "out.partial" / "config").exists()


class Killed(BaseException):
    """Ends a conversion at once."""


@pytest.mark.parametrize("at", range(1, 12))
def test_a_kill_at_any_change_of_the_disk_loses_neither_model(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    convert(out, "former")
    changes = 0

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def counts(*args: object, **options: object) -> object:
            nonlocal changes
            changes += 1
            if changes == at:
                raise Killed
            return call(*args, **options)

        return counts

    with monkeypatch.context() as patch:
        for owner, name in ((os, "replace"), (shutil, "rmtree"), *((Path, name) for name in ("rename", "unlink"))):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        patch.setattr(Path, "rmdir", counted(Path.rmdir))
        patch.setattr(Path, "mkdir", counted(Path.mkdir))
        patch.setattr(whole_folder, "_write_record", counted(whole_folder._write_record))
        try:
            convert(out, "new")
        except Killed:
            pass
        else:
            assert at > 10, "the test kills at changes that there are not"
    whole = {"below/weights", "config", RECORD}

    def someone_is_whole() -> bool:
        return any(set(contents(folder)) >= whole for folder in tmp_path.iterdir())

    assert someone_is_whole()
    # Another one begins, and is killed before it has written anything.
    with pytest.raises(Killed), resumed_folder(out, {"text": "third"}, inputs={}, overwrite=True):
        raise Killed
    assert someone_is_whole()
    convert(out, "new")
    assert (out / "config").read_text() == "new" and set(contents(out)) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_commands_keep_their_inputs_and_foreign_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, checkpoint, notes = tmp_path / "model", tmp_path / "checkpoint", tmp_path / "notes.txt"
    models.save("llama", model)
    notes.write_text(MINE)
    assert main(["convert", "from-hf", str(model), str(checkpoint)]) == 0

    def names() -> list[str]:
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))

    before = names()
    refused = [
        ("from-hf", model, model, "MODEL is"),
        ("from-hf", model, tmp_path, "MODEL is"),
        ("upcycle", checkpoint, checkpoint, "SOURCE is"),
        ("to-hf", checkpoint, checkpoint, "SOURCE is"),
        ("to-hf", checkpoint / "release", checkpoint, "SOURCE is"),
        ("to-hf", checkpoint, notes, "it is a file"),
        ("to-hf", checkpoint, model, "no conversion wrote it"),
        ("upcycle", checkpoint, checkpoint / "release", "no conversion wrote it"),
    ]
    for command, source, target, said in refused:
        assert main(["convert", command, str(source), str(target), "--overwrite"]) == 2
        assert said in capsys.readouterr().err
    assert names() == before and notes.read_text() == MINE
    # Megatron saved into the folder of the start since then.
    (checkpoint / "iter_0000010").mkdir()
    assert main(["convert", "from-hf", str(model), str(checkpoint), "--overwrite"]) == 2
    assert "it has iter_0000010, which no conversion wrote" in capsys.readouterr().err
