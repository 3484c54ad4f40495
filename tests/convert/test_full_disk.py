# SPDX-License-Identifier: Apache-2.0
"""A full disk ends a conversion with one line, and what is whole is kept for the next one."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.cli.main import main
from megatron_ext.convert.whole_folder import system_errors
from tests.convert import models
from tests.convert.test_round_trip import same
from tests.support.corpus import run_in_child

LIMIT = 30_000
"""Bytes of a file, fewer than those of the embedding."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and a checkpoint made of it."""
    folder = tmp_path_factory.mktemp("start")
    models.save("llama", folder / "model")
    assert main(["convert", "from-hf", str(folder / "model"), str(folder / "checkpoint")]) == 0
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Make a disk of 200 kB, which is less than the model has."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("root alone mounts a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


DIRECTIONS = [("from-hf", "model"), ("to-hf", "checkpoint")]


def said(error: str, target: Path, reason: str) -> None:
    """Check that standard error has one line of ours, and what it says."""
    assert error.count("megatron-ext: error:") == 1 and "Traceback" not in error
    line = error.partition("megatron-ext: error: ")[2]
    assert line.startswith(f"{target}: {reason}; {target}.partial is kept, with ")
    assert line.endswith("MB: the same command continues after the files in it that are whole\n")


@pytest.mark.parametrize(("direction", "source"), DIRECTIONS)
def test_a_file_that_the_system_does_not_take_is_one_line_and_the_same_command_continues(
    direction: str, source: str, start: Path, tmp_path: Path
):
    words = ["convert", direction, str(start / source), str(tmp_path / "out")]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))  # Python ignores the signal: the write fails
        sys.stderr = (tmp_path / "error").open("w", encoding="ascii")
        assert main(words) == 2
        sys.stderr.flush()

    assert run_in_child(limited) == 0
    said((tmp_path / "error").read_text(), tmp_path / "out", "cannot be written (File too large)")
    assert not (tmp_path / "out").exists()
    assert main(words) == 0
    assert [path.name for path in tmp_path.iterdir() if path.name != "error"] == ["out"]
    if direction == "to-hf":
        assert same(start / "model", tmp_path / "out")


@pytest.mark.parametrize(("direction", "source"), DIRECTIONS)
def test_a_full_disk_is_named(
    direction: str, source: str, start: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["convert", direction, str(start / source), str(small_disk / "out")]) == 2
    said(capsys.readouterr().err, small_disk / "out", "the disk is full (No space left on device)")
    assert [path.name for path in small_disk.iterdir()] == ["out.partial"]


def test_an_error_that_hides_none_of_the_system_stays_what_it_is():
    with pytest.raises(RuntimeError, match="out of ideas"), system_errors(RuntimeError):
        raise RuntimeError("out of ideas")
