# SPDX-License-Identifier: Apache-2.0
"""A list of corpora is written by `data list`, checked by `data check`, and trained on by Megatron as one."""

import argparse
from pathlib import Path

import pytest

from megatron_ext.cli.main import main
from megatron_ext.data.manifest import read_manifest
from megatron_ext.errors import UserError
from megatron_ext.quietly import quietly
from tests.support.corpus import make, write_json_lines, write_without_record


def corpora(folder: Path) -> list[str]:
    """Make two corpora, one of them deeper; return their prefixes as a list has them."""
    for name, count in (("b", 40), ("sub/a", 80)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        lines = write_json_lines(folder / "in.jsonl", [f"{name} text {number} " * 9 for number in range(count)])
        make(lines, folder / name)
    return [str(folder / "b"), str(folder / "sub/a")]


def test_megatron_trains_on_what_is_listed_as_on_one_corpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefixes = corpora(tmp_path / "data")
    listed = tmp_path / "out/files.txt"
    assert main(["data", "list", str(tmp_path / "data"), "--output", str(listed)]) == 0
    assert listed.read_text() == "".join(f"{prefix}\n" for prefix in prefixes)
    assert "2 corpora" in capsys.readouterr().out
    assert main(["data", "check", "--data-args-path", str(listed)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("no id above 256") == 2
    assert printed.endswith(f"--tokenizer-type NullTokenizer --vocab-size 257 --data-args-path {listed}\n")
    with quietly():
        from megatron.training.utils import get_blend_and_blend_per_split

        names = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path")
        blend, per_split = get_blend_and_blend_per_split(
            argparse.Namespace(data_args_path=str(listed), **dict.fromkeys(names))
        )
    assert (blend, per_split) == ((prefixes, None), None)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/a /b\n/c\n", ["/a", "/b", "/c"]),
        ("0.7 /a 30 /b", ["/a", "/b"]),
        ("a\n", ["a"]),
        ("", "names no corpus"),
        ("0.7 /a /b", "has 0.7 where a corpus is expected"),
        ("/a 0.3", "has 0.3 where a corpus is expected"),
    ],
)
def test_a_list_is_read_as_megatron_reads_it(tmp_path: Path, text: str, found: list[str] | str) -> None:
    path = tmp_path / "files.txt"
    path.write_text(text)
    if isinstance(found, list):
        assert read_manifest(path) == found
    else:
        with pytest.raises(UserError, match=found):
            read_manifest(path)


def test_what_cannot_be_listed_is_named_and_a_former_list_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed, data = tmp_path / "files.txt", tmp_path / "data"
    listed.write_text("former")

    def refusal(*folders: Path) -> str:
        assert main(["data", "list", *map(str, folders), "--output", str(listed)]) == 2
        return capsys.readouterr().err

    assert "data: is not a folder" in refusal(data)
    data.mkdir()
    assert "has no corpus (.bin and .idx); megatron-ext data prepare makes one" in refusal(data)
    (data / "t_000_000000.npy").write_bytes(b"\0")
    assert "of token ids (.npy) megatron-ext data prepare --format tokens makes one" in refusal(data)
    write_without_record(data / "whole", [[1, 2]])
    assert "a folder is given twice, or lies in another one" in refusal(data, data)
    (data / "cut.idx").write_bytes((data / "whole.idx").read_bytes())
    assert "there is no" in refusal(data) and listed.read_text() == "former"
    (data / "cut.bin").write_bytes(b"\0")
    assert "cut.bin: has 1 bytes, and its index speaks of 8" in refusal(data)
    (data / "cut.idx").unlink()
    (data / "a b").mkdir()
    write_without_record(data / "a b/c", [[1, 2]])
    assert "a b/c: has white space in its path" in refusal(data)
    assert main(["data", "check", "x", "--data-args-path", str(listed)]) == 2
    assert "PREFIX x and --data-args-path both name data" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["A thesis.\n", "/a\nb\n", "0.7 /a\n0.3 /b\n", "/a /b\n", "\n", "\xff"])
def test_nothing_but_a_former_list_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "data").mkdir()
    write_without_record(tmp_path / "data/a", [[1, 2]])
    listed = tmp_path / "files.txt"
    command = ["data", "list", str(tmp_path / "data"), "--output", str(listed)]
    listed.write_text(text, encoding="latin-1")
    assert main(command) == 2
    assert f"{listed}: is there already, and not a list that data list wrote" in capsys.readouterr().err
    assert listed.read_text(encoding="latin-1") == text and len(list(tmp_path.iterdir())) == 2
    for former in ("", "/one\n/two\n", "/one"):
        listed.write_text(former)
        assert main(command) == 0
        assert listed.read_text() == f"{tmp_path}/data/a\n"
