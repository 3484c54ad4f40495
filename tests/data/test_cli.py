# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext data prepare` as typed by a user."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.cli.main import main
from megatron_ext.data.output import read_sidecar
from tests.support.corpus import read_texts, write_json_lines


def test_the_summary_ends_with_the_flags_for_megatron(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("hello")
    (folder / "b.txt").write_bytes(b"\xff")
    (folder / "c.txt").touch()
    (folder / "d.png").write_bytes(b"\0")
    prefix = tmp_path / "a folder/corpus"
    command = ["data", "prepare", str(folder), "--output-prefix", str(prefix), "--on-error", "skip"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{prefix}.bin, .idx, .json: 0.0 MB of uint16 in ")
    assert lines[1:-2] == [
        "  1 documents, 6 tokens, 0.0 MB of text from 4 files",
        "  left out: 1 binary file (.png 1)",
        "  left out: 1 empty file",
        "  left out: 1 unusable:",
        f"    {folder}/b.txt:1: not valid UTF-8: byte 0xff at offset 0 of the file",
        "  documents are in input order: --split takes validation and test from the end",
        "  warning: too few documents for Megatron's default --split 969,30,1, which leaves a part empty; "
        "use --split 1,0,0, or fewer and larger parts",
    ]
    assert lines[-2] == "use with:"
    assert shlex.split(lines[-1]) == [
        "--tokenizer-type", "NullTokenizer", "--vocab-size", "257", "--data-path", str(prefix),
    ]  # fmt: skip

    assert main([*command, "--reuse"]) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[0] == f"{prefix}: up to date, nothing done"
    assert again[1:] == lines[1:]


def test_a_file_name_that_is_not_utf8_can_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("fine")
    (tmp_path / os.fsdecode(b"in/caf\xe9.txt")).write_bytes(b"\xff")
    command = ["data", "prepare", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "corpus")]
    assert main([*command, "--on-error", "skip"]) == 0
    assert r"in/caf\xe9.txt:1: not valid UTF-8" in capsys.readouterr().out


def test_every_flag_reaches_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "gen").mkdir(parents=True)
    for name in ("a.log", "b.dat", "gen/c.log"):
        write_json_lines(folder / name, [f"{name} {n}" for n in range(3)], key="body")
    flags = "--format jsonl --jsonl-key body --glob *.log --exclude gen --workers 2 --shuffle-documents 3"
    prefix = tmp_path / "corpus"
    assert main(["data", "prepare", str(folder), "--output-prefix", str(prefix), *flags.split()]) == 0
    assert sorted(read_texts(prefix)) == ["a.log 0", "a.log 1", "a.log 2"]
    assert read_sidecar(prefix)["settings"] == {
        "format": "jsonl",
        "token_dtype": None,
        "jsonl_key": "body",
        "parquet_column": "text",
        "globs": ["*.log"],
        "excludes": ["gen"],
        "on_error": "fail",
        "shuffle_seed": 3,
    }


def test_stdlib_needs_nothing_but_a_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "prepare", "--stdlib", "--output-prefix", str(tmp_path / "corpus")]
    assert main([*command, "--glob", "json*.py", "--glob", "b*.py"]) == 0
    facts = read_sidecar(tmp_path / "corpus")
    assert facts["settings"]["shuffle_seed"] == 1234
    assert facts["settings"]["on_error"] == "skip"
    assert facts["settings"]["globs"] == ["json*.py", "b*.py"]
    assert "site-packages" in facts["settings"]["excludes"]
    assert facts["documents"] > 5
    assert "documents are in input order" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("secret", "of no file or folder that is looked at does a name fit it"),
        ("in/secrets", "of no file or folder that is looked at does the path inside an input folder fit it"),
        ("*.py", "leaves nothing out"),
        ("named.txt", "files given themselves, and what is in folders left out, are not looked at"),
        ("secrets", None),
        (".git", None),
    ],
)
def test_an_exclude_that_fits_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pattern: str, said: str | None
) -> None:
    (tmp_path / "in/secrets").mkdir(parents=True)
    (tmp_path / "in/.git").mkdir()
    for name in ("in/a.txt", "in/secrets/b.txt", "named.txt"):
        (tmp_path / name).write_text(name)
    inputs = [str(tmp_path / "in"), str(tmp_path / "named.txt")]
    command = ["data", "prepare", *inputs, "--output-prefix", str(tmp_path / "corpus"), "--exclude", pattern]
    assert main(command) == (0 if said is None else 2)
    err = capsys.readouterr().err
    assert said is None or (f"error: --exclude {pattern} leaves nothing out" in err and said in err)
    assert (tmp_path / "corpus.bin").exists() == (said is None)


@pytest.mark.parametrize(("documents", "advice"), [(2, "--split 1,1,0"), (400, "--split 399,1,0"), (600, None)])
def test_a_split_that_would_make_megatron_hang_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], documents: int, advice: str | None
) -> None:
    write_json_lines(tmp_path / "in.jsonl", [f"text {n}" for n in range(documents)])
    assert main(["data", "prepare", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "corpus")]) == 0
    printed = capsys.readouterr().out
    assert ("leaves a part empty" in printed) == (advice is not None)
    assert advice is None or advice in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no input given; name files or folders, or use --stdlib"),
        (["--stdlib", "x"], "--stdlib and the input x exclude each other"),
        (["x"], "input x: No such file or directory; check the path"),
        (["x", "--trust-remote-code"], "--trust-remote-code has no meaning without --tokenizer"),
        (["x", "--workers", "0"], "--workers 0: must be at least 1"),
    ],
)
def test_bad_flags_end_with_status_2_and_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", "prepare", "--output-prefix", "out/corpus", *flags]) == 2
    assert capsys.readouterr().err == f"megatron-ext: error: {message}\n"
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_ends_with_status_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_ext.data.prepare.prepare", interrupt)
    assert main(["data", "prepare", "x", "--output-prefix", str(tmp_path / "corpus")]) == 130
    assert "interrupted, no output written" in capsys.readouterr().err


def test_sigterm_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told_to_end(*_: object, **__: object) -> None:
        assert (tmp_path / ".corpus.partial").is_dir()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("megatron_ext.data.prepare.encode_all", told_to_end)
    (tmp_path / "in.txt").write_text("one")
    with pytest.raises(SystemExit) as end:
        main(["data", "prepare", str(tmp_path / "in.txt"), "--output-prefix", str(tmp_path / "corpus")])
    assert end.value.code == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == ["in.txt"]


def test_help_and_errors_come_without_importing_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from megatron_ext.cli.main import main; status = main(sys.argv[1:]); "
        "sys.exit(99 if 'torch' in sys.modules else status)"
    )
    command = [sys.executable, "-c", program, "data", "prepare", str(tmp_path), "--output-prefix"]
    result = subprocess.run([*command, str(tmp_path / "c")], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2, result.stderr
    assert "the folder is empty" in result.stderr
