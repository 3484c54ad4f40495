# SPDX-License-Identifier: Apache-2.0
"""JSON is read as records or named as an error, whatever its shape: it never becomes one text without a word."""

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.cli.main import main
from megatron_ext.data import content
from megatron_ext.errors import UserError
from tests.support.corpus import make, read_texts

TEXTS = ["one", "two", "three"]
ROWS = [{"text": text} for text in TEXTS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS).encode()
CODE = b"def f():\n    return {}\n"
BLANK = b" \r\n\t\n" * 20_000
LONG = b"9" * 5000
NO_KEY = "no key 'text'; keys are "
ONE_TEXT = "--format text takes each file as one text"
EXPECTED = f"where an object with the key 'text' is expected; {ONE_TEXT}"
NOT_JSON = "not JSON although its name promises that: it begins with "


def name_of(value: object) -> str | None:
    """Return what a case is called: its file's name, not its bytes, which hold times."""
    return None if isinstance(value, str) else ""


def tabulated(*rows: dict[str, Any]) -> bytes:
    return "\n".join(json.dumps(row, indent=2) for row in rows).encode()


@pytest.mark.parametrize(
    ("name", "data", "texts"),
    [
        ("lines.json", BLANK + LINES, TEXTS),
        ("lines.txt", BLANK + LINES, TEXTS),
        ("records.json", BLANK + tabulated(*ROWS), TEXTS),
        ("array.json.gz", gzip.compress(BLANK + ARRAY), TEXTS),
        ("array", BLANK + b"[" + BLANK + ARRAY[1:], TEXTS),
        ("code.py", BLANK + CODE, [(BLANK + CODE).decode()]),
        ("two lines.json", b'{"text": "one", "more":\n{"b": 1}\n}', ["one"]),
        ("two a line.json", b'{"text": "one"} {"text":\n"two"}\n', ["one", "two"]),
        ("long.json", b'{"id": ' + LONG + b', "text": "one"}', ["one"]),
        ("long record.json", b'{"id":\n ' + LONG + b', "text": "one"}', ["one"]),
        ("long in array.json", b'[{"id": -' + LONG + b', "text": "one"}]', ["one"]),
        ("mark.jsonl", b'{"text": "\\ufeffone"}\n{"text": "\\ufeff"}\n{"text": "t\\ufeffwo"}', ["one", "t\ufeffwo"]),
        ("mark.json", '[{"text": "\ufeffone"}]'.encode(), ["one"]),
        ("last counts.json", b'{"text": "none", "text": "one"}', ["one"]),
    ],
    ids=name_of,
)
def test_records_are_found_behind_any_white_space_and_over_any_lines(
    tmp_path: Path, name: str, data: bytes, texts: list[str]
) -> None:
    (tmp_path / name).write_bytes(data)
    make(tmp_path / name, tmp_path / "corpus")
    assert read_texts(tmp_path / "corpus") == texts


@pytest.mark.parametrize(
    ("name", "data", "message", "texts"),
    [
        ("header.json", b"# header\n" + LINES, f"{NOT_JSON}'#'; repair its beginning, or use --format text", []),
        ("tsconfig.json", b"// by hand\n" + tabulated({"a": 1}), f"{NOT_JSON}'/'; repair its beginning, or", []),
        ("sequence.json", b"\x1e" + LINES, f"{NOT_JSON}'\\x1e'; repair its beginning, or use --format text", []),
        ("prose.json", b"once upon a time", f"{NOT_JSON}'o'; repair its beginning, or use --format text", []),
        ("null first.json", b"null\n" + LINES, f":1: JSON null {EXPECTED}", TEXTS),
        ("number first.json", b"1\n" + LINES, f":1: JSON number {EXPECTED}", TEXTS),
        ("strings.json", b'"a"\n"b"\n', ":1: JSON string where an object", []),
        ("strings.json", b'"a"\n"b"\n', f"; --format json takes each string as a document, {ONE_TEXT}", []),
        ("damaged.json", b'{"text": "a\n' * 3 + LINES, ":1: not JSON: Unterminated string", TEXTS),
        ("damaged", b'{"text": "a\n' * 3 + LINES, ":1: not JSON: Unterminated string", TEXTS),
        ("cut.json", b'{"text": "a"\n' * 3 + LINES, ":1: not JSON: Expecting ',' delimiter", TEXTS),
        ("in line.json", b'{"text": "a"} {"b": x}\n' + LINES, ":1: not JSON: Extra data at column 15", TEXTS),
        ("too deep.json", b'{"a": ' + b"[" * 200_000 + b"\n" + LINES, ":1: not usable JSON: arrays or objects", TEXTS),
        ("long number.json", b'{"text": ' + LONG + b"}\n" + LINES, ":1: key 'text' holds number, not", TEXTS),
        ("prose", b'{"a": 1} is what it printed\n', f":1: not JSON: Extra data at column 10; {ONE_TEXT}", []),
        ("latin-1.json", b'{"text": "\xe9"}\n' + LINES, ":1: not valid UTF-8: byte 0xe9 at offset 10", TEXTS),
        ("comma.json", b'{\n "text": "a",\n}\n', "(record 1): not JSON: Expecting property name", []),
        ("comma", b'{\n "text": "a",\n}\n', f"nothing could be read after record 0; {ONE_TEXT}", []),
        ("comment.json", b'{\n // by hand\n "text": "a"}', "(record 1): not JSON: Expecting property name", []),
        ("null in array.json", b"[null, " + ARRAY[1:], f"(record 1): JSON null {EXPECTED}", TEXTS),
        ("number in array.json", b"[1, " + ARRAY[1:], f"(record 1): JSON number {EXPECTED}", TEXTS),
        ("arrays.json", b'[["a"], ["b"]]', f"(record 1): JSON array {EXPECTED}", []),
        ("package.json", tabulated({"name": "x"}), f"(record 1): {NO_KEY}'name' (--jsonl-key); {ONE_TEXT}", []),
        ("other keys.json", tabulated({"b": "a"}, {"b": "c"}), f"(record 1): {NO_KEY}'b' (--jsonl-key)", []),
        ("other keys", tabulated({"b": "a"}, {"b": "c"}), f"(record 1): {NO_KEY}'b' (--jsonl-key)", []),
        ("first without.json", tabulated({"b": "a"}, *ROWS), f"(record 1): {NO_KEY}'b' (--jsonl-key)", TEXTS),
        ("wrapped.json", tabulated({"data": ROWS}), f"(record 1): {NO_KEY}'data' (--jsonl-key)", []),
        ("wrapped.json.gz", gzip.compress(b'{"data": []}'), f":1: {NO_KEY}'data' (--jsonl-key)", []),
        ("twice.jsonl.gz", gzip.compress(gzip.compress(LINES)), "compressed twice, with gzip and then with gzip", []),
        ("twice.txt.xz", lzma.compress(bz2.compress(CODE)), "compressed twice, with bzip2 and then with xz", []),
    ],
    ids=name_of,
)  # fmt: skip
def test_json_that_is_not_a_record_is_named_with_the_way_out_and_the_records_beside_it_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, data: bytes, message: str, texts: list[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data)
    (tmp_path / "in" / "zz good.txt").write_text("good")
    command = ["data", "prepare", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "corpus")]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/in/{name}" in line and message in line and "--on-error skip" in line, line
    assert not list(tmp_path.glob("corpus*"))
    assert main([*command, "--on-error", "skip"]) == 0
    assert read_texts(tmp_path / "corpus") == [*texts, "good"]
    assert "left out: " in capsys.readouterr().out


@pytest.mark.parametrize("data", [BLANK, b"[]", b"\xef\xbb\xbf", b" [\n]"], ids=["blank", "array", "mark", "lines"])
def test_json_without_a_record_is_counted_as_an_empty_file_and_is_not_text(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.json").write_bytes(data)
    (tmp_path / "in/b.txt").write_text("good")
    facts = make(tmp_path / "in", tmp_path / "corpus").sidecar
    assert read_texts(tmp_path / "corpus") == ["good"]
    assert facts["skipped"] == {"empty file": 1}


def test_format_text_takes_json_as_texts(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_bytes(tabulated({"name": "x"}))
    make(tmp_path / "package.json", tmp_path / "corpus", file_format="text")
    assert read_texts(tmp_path / "corpus") == ['{\n  "name": "x"\n}']


def test_a_first_record_without_an_end_in_sight_is_refused_before_all_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "_RECORD_PROBE_BYTES", 1000)
    (tmp_path / "x.json").write_bytes(tabulated({"data": ROWS * 100}))
    with pytest.raises(UserError, match=r"x.json: its first record has no end in 1000 bytes; write one JSON line per"):
        make(tmp_path / "x.json", tmp_path / "corpus")
    (tmp_path / "x.json").write_bytes(tabulated(*ROWS * 100))
    assert make(tmp_path / "x.json", tmp_path / "corpus").sidecar["documents"] == 300


def test_markup_among_code_is_asked_for_with_ways_to_leave_it_out_or_to_take_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"a.py": CODE, "b.md": b"<div align=center>\n<h1>one</h1></div>", "c.html": b"<p>x", "d/e.csv": b"x,y\n"}
    for name, data in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    command = ["data", "prepare", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "corpus"), "--overwrite"]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 tables or documents in markup (CSV, HTML, PDF, ...)" in line
    assert f"({tmp_path}/in/c.html, {tmp_path}/in/d/e.csv): --format text takes each file as one text" in line
    assert "(--exclude '*.html' --exclude '*.csv')" in line
    assert main([*command, "--exclude", "*.html", "--exclude", "*.csv"]) == 0
    assert read_texts(tmp_path / "corpus") == [files[name].decode() for name in ("a.py", "b.md")]
    assert main([*command, "--on-error", "skip"]) == 0
    assert "d/e.csv: a table of comma-separated values (CSV), as its name says, which" in capsys.readouterr().out
    assert read_texts(tmp_path / "corpus") == [files[name].decode() for name in ("a.py", "b.md")]
    assert main([*command, "--format", "text"]) == 0
    assert read_texts(tmp_path / "corpus") == [data.decode() for data in files.values()]


def test_a_table_row_has_no_byte_order_mark_either(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `data` is not installed")
    import pyarrow

    parquet.write_table(pyarrow.table({"text": ["\ufeffone", "\ufeff"]}), tmp_path / "a.parquet")
    make(tmp_path / "a.parquet", tmp_path / "corpus")
    assert read_texts(tmp_path / "corpus") == ["one"]
