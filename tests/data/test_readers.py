# SPDX-License-Identifier: Apache-2.0
"""Files to documents; bad files to messages that name the line."""

import codecs
import gzip
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data import readers
from megatron_ext.data.discover import FileFormat, find_sources
from megatron_ext.data.documents import MAX_DOCUMENT_BYTES, Document, Item, Problem, Skipped
from megatron_ext.errors import UserError
from tests.support.corpus import unhurried, write_json_lines


def read(path: Path, file_format: FileFormat | None = None, *, column: str = "text") -> list[Item]:
    (source,) = find_sources([path], file_format=file_format or "auto").files
    return list(readers.read_documents(source, parquet_column=column))


def read_in_folder(folder: Path) -> list[Item]:
    (source,) = find_sources([folder]).files
    return list(readers.read_documents(source))


def test_a_text_file_is_one_document_with_its_bytes_untouched(tmp_path: Path) -> None:
    data = "\ufeffline one\r\nline two \u00e9\n\n".encode()
    (tmp_path / "a.py").write_bytes(data)
    (document,) = read(tmp_path / "a.py")
    assert isinstance(document, Document)
    assert document.payload == data
    assert document.source_bytes == len(data)


def test_empty_files_are_skipped_not_errors(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"):
        (tmp_path / name).touch()
        assert read(tmp_path / name) == [Skipped(reason="empty file", path=str(tmp_path / name))]
    (tmp_path / "blank.jsonl").write_text("\n  \n")
    assert read(tmp_path / "blank.jsonl") == [
        Skipped(reason="empty file", path=str(tmp_path / "blank.jsonl"))
    ]
    write_json_lines(tmp_path / "none.jsonl.gz", [])
    (skipped,) = read(tmp_path / "none.jsonl.gz")
    assert isinstance(skipped, Skipped)


def test_binary_files_are_skipped_in_a_folder_but_refused_when_named(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"\x89PNG\0\0")
    assert read_in_folder(tmp_path) == [Skipped(reason="binary file", path=str(tmp_path / "x.png"))]
    (problem,) = read(tmp_path / "x.png")
    assert str(problem).endswith("x.png: binary data (zero byte at offset 4), not text; leave the file out")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_text_of_another_encoding_is_named_and_not_taken_for_binary(tmp_path: Path, encoding: str) -> None:
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    (tmp_path / "x.txt").write_bytes(mark + "some text".encode(encoding))
    (problem,) = read_in_folder(tmp_path)
    assert "x.txt: UTF-16 or UTF-32 text, as its first bytes say; convert the file to UTF-8" in str(problem)


def test_a_problem_is_one_line_whatever_the_file_is_called(tmp_path: Path) -> None:
    (tmp_path / "two\nlines.txt").write_bytes(b"\xff\xfe\x00")
    (problem,) = read_in_folder(tmp_path)
    assert "two\\nlines.txt: " in str(problem)
    assert "\n" not in str(problem)


def test_a_zero_byte_makes_a_text_binary_wherever_it_is(tmp_path: Path) -> None:
    for before in (0, readers.BINARY_PROBE_BYTES - 1, readers.BINARY_PROBE_BYTES, 3 << 20):
        (tmp_path / "a.txt").write_bytes(b"x" * before + b"\0")
        for settings in ({}, {"file_format": "text"}):
            (source,) = find_sources([tmp_path / "a.txt"], **settings).files
            (problem,) = readers.read_documents(source)
            assert f"a.txt: binary data (zero byte at offset {before}), not text" in str(problem)


def test_a_text_too_long_for_one_document_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "huge.txt", "wb") as file:
        file.truncate(MAX_DOCUMENT_BYTES + 1)  # sparse: takes no space, and reading it would take gigabytes
    (problem,) = read(tmp_path / "huge.txt")
    assert "too long for one document" in str(problem)
    assert "--format jsonl" in str(problem)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_each_json_line_is_a_document_with_its_line_number(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    data = b'\xef\xbb\xbf{"text": "one"}\r\n\n{"text": "three"}'
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    documents = read(path)
    assert [(d.position, d.payload) for d in documents if isinstance(d, Document)] == [
        ("line 1", b'{"text": "one"}'),  # without the byte-order mark, which JSON does not allow
        ("line 3", b'{"text": "three"}'),
    ]
    # Progress is measured in bytes of the file on disk.
    assert sum(d.source_bytes for d in documents if isinstance(d, Document)) == path.stat().st_size


def test_gzip_is_recognized_without_its_suffix_and_missed_when_only_the_suffix_is_there(
    tmp_path: Path,
) -> None:
    write_json_lines(tmp_path / "a.jsonl.gz", ["x"]).rename(tmp_path / "a.jsonl")
    assert len(read(tmp_path / "a.jsonl")) == 1
    (tmp_path / "b.jsonl.gz").write_text('{"text": "x"}\n')
    (problem,) = read(tmp_path / "b.jsonl.gz")
    assert str(problem).endswith("b.jsonl.gz: not gzip data although the name ends in .gz")


def test_a_truncated_gzip_file_yields_what_is_whole_then_names_the_line(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl.gz", [os.urandom(3000).hex() for _ in range(40)])
    path.write_bytes(path.read_bytes()[:-3000])
    *documents, problem = read(path)
    assert 1 <= len(documents) < 40
    assert all(isinstance(document, Document) for document in documents)
    line = len(documents) + 1
    assert str(problem) == (
        f"{path}:{line}: gzip data is truncated, nothing could be read after line {len(documents)}"
    )


def test_corrupt_gzip_data_is_a_problem(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl.gz", [os.urandom(3000).hex() for _ in range(40)])
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = b"\xff" * 40
    path.write_bytes(data)
    problem = read(path)[-1]
    assert isinstance(problem, Problem)
    assert "gzip data is corrupt" in str(problem)


def test_each_parquet_row_is_a_document(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    import pyarrow.parquet as pq

    texts = [f"text {index}" for index in range(2500)]
    columns = {
        "id": list(range(2500)),
        "text": texts,
        "large": pa.array(texts, pa.large_string()),
        "view": pa.array(texts, pa.string_view()),
        "dictionary": pa.array(texts).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=700)
    size = (tmp_path / "a.parquet").stat().st_size
    for column in ("text", "large", "view", "dictionary"):
        documents = [
            item for item in read(tmp_path / "a.parquet", column=column) if isinstance(item, Document)
        ]
        assert [document.payload for document in documents] == texts
        assert documents[-1].position == "row 2500"
        assert sum(document.source_bytes for document in documents) == size


def test_bad_parquet_files_name_the_column_or_the_row(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2], "body": ["x", None]}), path)
    assert [str(item) for item in read(path)] == [
        f"{path}: no column 'text'; columns are id, body (--parquet-column)"
    ]
    assert [str(item) for item in read(path, column="id")] == [
        f"{path}: column 'id' has type int64, not string (--parquet-column)"
    ]
    document, problem = read(path, column="body")
    assert isinstance(document, Document)
    assert str(problem) == f"{path} (row 2): no text (null)"
    pq.write_table(pa.table([["x"], ["y"]], names=["text", "text"]), path)
    assert [str(item) for item in read(path)] == [
        f"{path}: 2 columns are named 'text'; rename one (--parquet-column)"
    ]

    invalid = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    pq.write_table(pa.table({"text": invalid}), path)
    document, problem = read(path)
    assert isinstance(document, Document)
    assert str(problem) == f"{path} (row 2): not valid UTF-8 at byte 0"

    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    assert read(path) == [Skipped(reason="empty file", path=str(path))]


def test_a_file_that_is_not_parquet_or_is_cut_off_is_a_problem(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    path.write_text("no parquet at all, but long enough to be looked at")
    (problem,) = read(path)
    assert str(problem).startswith(f"{path}: not a readable Parquet file: ")

    pq.write_table(pa.table({"text": ["x" * 1000] * 10}), path)
    path.write_bytes(path.read_bytes()[:-100])
    (problem,) = read(path)
    assert str(problem).startswith(f"{path}: not a readable Parquet file: ")


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_text("x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # what makes `import pyarrow` fail
    with pytest.raises(UserError, match=r"needs the package pyarrow .* pip install 'pyarrow>="):
        read(tmp_path / "a.parquet")


def test_a_file_that_vanishes_after_it_was_listed_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (source,) = find_sources([tmp_path]).files
    (tmp_path / "a.txt").unlink()
    (problem,) = readers.read_documents(source)
    assert str(problem) == f"{tmp_path / 'a.txt'}: cannot read: No such file or directory"


@unhurried
@given(data=st.binary(max_size=400), file_format=st.sampled_from(["text", "jsonl"]))
def test_no_content_makes_a_reader_raise(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, file_format: FileFormat
) -> None:
    path = tmp_path_factory.mktemp("any") / "file"
    path.write_bytes(data)
    items = read(path, file_format)
    assert items
    assert all(item.path == str(path) for item in items)


@unhurried
@given(cut=st.integers(0, 400), at=st.integers(0, 400), byte=st.integers(0, 255))
def test_no_damage_to_a_gzip_file_makes_a_reader_raise(
    tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, byte: int
) -> None:
    path = write_json_lines(tmp_path_factory.mktemp("any") / "a.jsonl.gz", [f"text {n}" for n in range(50)])
    data = bytearray(path.read_bytes())
    data[at % len(data)] = byte
    path.write_bytes(data[: max(1, len(data) - cut)])
    assert read(path)


@unhurried
@given(st.lists(st.text()))
def test_json_lines_come_back_in_order_with_every_text(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = write_json_lines(tmp_path_factory.mktemp("any") / "a.jsonl", texts)
    found = [json.loads(item.payload)["text"] for item in read(path) if isinstance(item, Document)]
    assert found == texts
