# SPDX-License-Identifier: Apache-2.0
"""Kinds of input files, and the documents that each becomes: content decides, and what is not read is told."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.cli.main import main
from megatron_ext.data import json_values
from megatron_ext.data.output import read_sidecar
from megatron_ext.errors import UserError
from tests.support.corpus import make, read_texts

pa = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")

TEXTS = ["one \u00e9", "two\nlines", "three"]
ROWS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS, ensure_ascii=False).encode()
CODE = b"def f():\n    return {}\n"
BOM = b"\xef\xbb\xbf"


def name_of(value: object) -> str | None:
    """Return what a case is called: its file's name, not its bytes, which hold times."""
    return "" if isinstance(value, bytes) else None


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


def parquet() -> bytes:
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), file)
    return file.getvalue()


def arrow(open_writer: Callable[..., Any]) -> bytes:
    file, table = io.BytesIO(), pa.Table.from_pylist(ROWS)
    with open_writer(file, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)
    return file.getvalue()


def arrow_file() -> bytes:
    return arrow(pa.ipc.new_file)


def arrow_stream() -> bytes:
    return arrow(pa.ipc.new_stream)


def tabulated(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(json.dumps(row, indent=2) for row in rows).encode()


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "text")
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "texts"),
    [
        ("lines.json", LINES, TEXTS),
        ("lines.txt", LINES, TEXTS),
        ("no suffix", LINES, TEXTS),
        ("bom.json", BOM + LINES, TEXTS),
        ("joined.jsonl", BOM + LINES + BOM + LINES, TEXTS * 2),
        ("crlf.json", LINES.replace(b"\n", b"\r\n"), TEXTS),
        ("blank lines.json", b"\n \n" + LINES.replace(b"\n", b"\n\n"), TEXTS),
        ("array.json", ARRAY, TEXTS),
        ("array in lines.json", json.dumps(ROWS, indent=2).encode(), TEXTS),
        ("array bom.json", BOM + b"\n" + ARRAY, TEXTS),
        ("array.jsonl", ARRAY, TEXTS),
        ("records over lines.json", tabulated(ROWS), TEXTS),
        ("records.json", b" ".join(line for line in LINES.splitlines()), TEXTS),
        ("lines.jsonl.gz", gzip.compress(LINES), TEXTS),
        ("lines.jsonl.bz2", bz2.compress(LINES), TEXTS),
        ("lines.jsonl.xz", lzma.compress(LINES), TEXTS),
        ("lines.jsonl.zst", zstd(LINES), TEXTS),
        ("two frames.jsonl.zst", zstd(LINES) + zstd(LINES), TEXTS * 2),
        ("lines.json.gz", gzip.compress(LINES), TEXTS),
        ("array.json.zst", zstd(ARRAY), TEXTS),
        ("zst without suffix", zstd(LINES), TEXTS),
        ("text.txt.gz", gzip.compress(CODE), [CODE.decode()]),
        ("text.txt.xz", lzma.compress(CODE), [CODE.decode()]),
        ("table.parquet", parquet(), TEXTS),
        ("table.bin", parquet(), TEXTS),
        ("table.parquet.gz", gzip.compress(parquet()), TEXTS),
        ("table.arrow", arrow_file(), TEXTS),
        ("table.feather", arrow_file(), TEXTS),
        ("stream.arrow", arrow_stream(), TEXTS),
        ("stream.arrow.zst", zstd(arrow_stream()), TEXTS),
        ("bom.txt", BOM + CODE, [CODE.decode()]),
        ("code.py", CODE, [CODE.decode()]),
        ("README.md", b"[![badge](x)](y)\n", ["[![badge](x)](y)\n"]),
        ("notes.txt", b"[1] a source\n", ["[1] a source\n"]),
        ("setup.cfg", b"[metadata]\nname = x\n", ["[metadata]\nname = x\n"]),
        ("block.c", b"{\n  int x;\n}\n", ["{\n  int x;\n}\n"]),
    ],
    ids=name_of,
)  # fmt: skip
def test_what_a_file_holds_decides_how_it_is_read(tmp_path: Path, name: str, data: bytes, texts: list[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data)
    facts = make(tmp_path / "in", tmp_path / "corpus").sidecar
    assert read_texts(tmp_path / "corpus") == texts
    assert (facts["documents"], facts["largest_id"]) == (len(texts), 256)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("other key.json", b'{"body": "x"}\n', ":1: no key 'text'; keys are 'body' (--jsonl-key); --format text"),
        ("array of other.json", b'[{"body": "x"}]', r"(record 1): no key 'text'; keys are 'body' (--jsonl-key)"),
        ("damaged first.json", b'{"text": "a\n' + LINES, ":1: not JSON: "),
        ("damaged later.json", LINES + b'{"text": "a\n', ":4: not JSON: "),
        ("array cut.json", ARRAY[:-1], "(record 4): a ',' or the end of the array is missing; the file is truncated"),
        ("array cut early.json", ARRAY[:-4], "(record 3): not JSON: Unterminated string starting at character"),
        ("array and more.json", ARRAY + b"x", "comes something after the end of the array"),
        ("array no comma.json", ARRAY.replace(b"}, {", b"} {"), "is '{' where ',' is expected"),
        ("array latin-1.json", ARRAY.decode().encode("latin-1"), "not valid UTF-8: byte 0xe9 at offset"),
        ("strings.json", b'["a", "b"]', "a JSON array of strings; use --format json to take each as a document, or"),
        ("cut.jsonl.bz2", bz2.compress(LINES)[:-4], "bzip2 data is truncated, nothing could be read"),
        ("cut.jsonl.xz", lzma.compress(LINES)[:-4], "xz data is truncated, nothing could be read"),
        ("cut.jsonl.zst", zstd(LINES)[:-4], "zstd data is truncated, nothing could be read"),
        ("cut.txt.gz", gzip.compress(CODE * 9000)[:-9], "gzip data is truncated"),
        ("more.jsonl.zst", zstd(LINES) + b"x" * 9, "zstd data is corrupt"),
        ("plain.jsonl.zst", LINES, "not zstd data although the name ends in .zst"),
        ("plain.txt.bz2", CODE, "not bzip2 data although the name ends in .bz2"),
        ("picture.png", b"\x89PNG\0\0", "binary data (zero byte at offset 4), not text"),
        ("picture.png.gz", gzip.compress(b"\x89PNG\0\0"), "binary data (zero byte at offset 4), not text"),
        ("archive.zip", zipped(), "a zip archive, as its first bytes say; unpack it"),
        ("archive.docx", zipped(), "a zip archive, as its first bytes say; unpack it"),
        ("archive.tar", b"a.txt".ljust(257, b"\0") + b"ustar\0" + bytes(300), "a tar archive, as its first bytes say"),
        ("utf-16.jsonl", LINES.decode().encode("utf-16"), "UTF-16 or UTF-32 text, as its first bytes say; convert"),
        ("latin-1.txt", "caf\u00e9".encode("latin-1"), ":1: not valid UTF-8: byte 0xe9 at offset 3 of the file"),
        ("cut.parquet", parquet()[:-9], "not a readable Parquet file: "),
        ("cut.arrow", arrow_file()[:-20], "not a readable Arrow file: "),
    ],
    ids=name_of,
)  # fmt: skip
def test_what_is_not_read_ends_with_its_name_and_status_2_unless_it_is_to_be_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, data: bytes, message: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data)
    (tmp_path / "in" / "zz good.txt").write_text("good")
    command = ["data", "prepare", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "out/corpus")]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/in/{name}" in line and message in line and "--on-error skip" in line, line
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    assert main([*command, "--on-error", "skip"]) == 0
    assert read_texts(tmp_path / "out/corpus")[-1] == "good"
    assert "left out: 1 " in capsys.readouterr().out


def test_forty_json_files_of_five_lines_are_two_hundred_documents(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for shard in range(40):
        lines = [json.dumps({"text": f"document {shard}.{number}"}) for number in range(5)]
        (tmp_path / f"in/{shard:02}.json").write_text("\n".join(lines))
    assert main(["data", "prepare", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "corpus")]) == 0
    assert read_sidecar(tmp_path / "corpus")["documents"] == 200
    assert read_texts(tmp_path / "corpus")[7] == "document 1.2"


def test_many_files_that_are_not_read_are_told_in_one_line_with_the_options_that_leave_them_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    (folder / "pkg").mkdir(parents=True)
    (folder / "a.py").write_bytes(CODE)
    for number in range(5):
        (folder / f"pkg/{number}.png").write_bytes(b"\x89PNG\0\0")
    (folder / "pkg/x.jar").write_bytes(zipped())
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "pipe")
    command = ["data", "prepare", str(folder), "--output-prefix", str(tmp_path / "corpus")]
    assert main([*command, "--verbose"]) == 2
    *listed, line = capsys.readouterr().err.splitlines()
    assert line == (
        f"megatron-ext: error: 8 of the input's files are not read: 1 unreadable file or folder ({folder}/gone.txt); "
        f"1 device, pipe or socket ({folder}/pipe); 5 binary files ({folder}/pkg/0.png, {folder}/pkg/1.png, "
        f"{folder}/pkg/2.png, ...); 1 archive ({folder}/pkg/x.jar); leave them out (--exclude '*.png' "
        "--exclude '*.txt' --exclude pipe --exclude '*.jar'), or use --on-error skip, which leaves out all that is "
        "unusable (--verbose names every one)"
    )
    assert len(listed) == 8
    assert f"not read: {folder}/pkg/4.png: binary data (zero byte at offset 4)" in "\n".join(listed)
    advised = re.findall(r"--exclude '?([^' )]+)", line)
    assert main([*command, *(word for pattern in advised for word in ("--exclude", pattern))]) == 0
    assert read_texts(tmp_path / "corpus") == [CODE.decode()]
    assert main([*command, "--on-error", "skip", "--overwrite"]) == 0
    facts = read_sidecar(tmp_path / "corpus")
    assert len(facts["unread"]) == 8 and facts["documents"] == 1


def advised(command: list[str], line: str) -> list[str]:
    """Return a command with the options that an error message gives."""
    options = shlex.split(line[line.index("(--exclude ") + 1 :].partition(")")[0])
    return [*command, *options]


def test_the_advice_leaves_out_no_file_that_is_read_and_gives_each_kind_its_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    for name, data in {
        "a.json": b'["a", "b"]',
        "good.json": LINES,
        "sub/[1].json": b"# no JSON",
        "sub/good.json": LINES,
        "more/good.json": b'["a", "b"]',
        "good.txt": b"good",
        "utf-16.txt": b"\xff\xfea\0",
        "pictures/a.png": b"\0",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    command = ["data", "prepare", str(folder), "--output-prefix", str(tmp_path / "corpus")]
    assert main([*command, "--exclude", "utf-16.txt"]) == 2
    line = capsys.readouterr().err
    assert f"2 JSON arrays of strings ({folder}/a.json, {folder}/more/good.json): --format json takes each" in line
    assert f"1 file that is not JSON ({folder}/sub/[1].json): --format text takes each file as one text" in line
    assert main([*advised(command, line), "--exclude", "utf-16.txt"]) == 0
    assert read_texts(tmp_path / "corpus") == [*TEXTS, "good", *TEXTS]
    assert main([*command, "--overwrite", "--glob", "*.txt"]) == 2
    line = capsys.readouterr().err
    assert "(--exclude utf-16.txt)" in line and "convert the file to UTF-8" in line
    assert main([*advised(command, line), "--overwrite", "--glob", "*.txt"]) == 0
    assert read_texts(tmp_path / "corpus") == ["good"]


def test_verbose_names_hidden_and_empty_files_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / ".b").write_text("b")
    (folder / "c.txt").touch()
    command = ["data", "prepare", str(folder), "--output-prefix", str(tmp_path / "corpus"), "--verbose"]
    assert main(command) == 0
    listed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("not read: ")]
    assert listed == [f"not read: {folder}/.b: hidden", f"not read: {folder}/c.txt: empty file"]


@pytest.mark.parametrize(
    ("name", "data", "file_format", "texts"),
    [
        ("x.json", LINES, "text", [LINES.decode()]),
        ("x.json.gz", gzip.compress(LINES), "text", [LINES.decode()]),
        ("x.dat", b'["a", "b"]', "json", ["a", "b"]),
        ("x.dat", ARRAY, "json", TEXTS),
        ("x.dat", zstd(LINES), "jsonl", TEXTS),
        ("x.dat", arrow_file(), "arrow", TEXTS),
    ],
    ids=name_of,
)
def test_a_format_that_the_user_gives_replaces_what_the_file_looks_like(
    tmp_path: Path, name: str, data: bytes, file_format: str, texts: list[str]
) -> None:
    (tmp_path / name).write_bytes(data)
    command = ["data", "prepare", str(tmp_path / name), "--output-prefix", str(tmp_path / "corpus")]
    assert main([*command, "--format", file_format]) == 0
    assert read_texts(tmp_path / "corpus") == texts


def test_the_key_of_the_text_tells_records_from_other_json(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(tabulated([{"body": "a"}, {"body": "b"}]))
    make(tmp_path / "x.json", tmp_path / "corpus", jsonl_key="body")
    assert read_texts(tmp_path / "corpus") == ["a", "b"]


def test_zstd_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.jsonl.zst").write_bytes(zstd(LINES))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)  # what makes `import pyarrow` fail
    with pytest.raises(UserError, match=r"x.jsonl.zst, which is compressed with zstd, needs .* pip install"):
        make(tmp_path / "x.jsonl.zst", tmp_path / "corpus")


def test_an_array_is_read_in_pieces_and_comes_back_whole_wherever_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[Any] = [{"text": "\u00e9\U0001f600\\\"" * 9}, 12, -1.5e3, None, True, [{}, []], "x\ud83d", {"a": 1}]
    data = json.dumps(values, ensure_ascii=True).encode() + b" \n"
    text = json.dumps(values[:-2], ensure_ascii=False).encode()
    for source, wanted in ((data, values), (text, values[:-2])):
        for chunk in range(1, 60):
            monkeypatch.setattr(json_values, "_CHUNK_BYTES", chunk)
            stream = io.BufferedReader(io.BytesIO(source))
            assert [value for _, value in json_values.json_values(stream)] == wanted


def test_a_record_too_long_for_one_document_is_told_before_all_of_it_is_read() -> None:
    stream = io.BufferedReader(io.BytesIO(b'[{"text": "' + b"x" * 5_000_000))
    with pytest.raises(json_values.BadJson, match="longer than 1000 bytes, too long for one document"):
        list(json_values.json_values(stream, most_bytes=1000))
    assert stream.tell() < 2_000_000
