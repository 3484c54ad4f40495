# SPDX-License-Identifier: Apache-2.0
"""The table of docs/data.md: kinds of input, and the documents and tokens that `data prepare` makes of each."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import UserError
from tests.support.corpus import make, read_texts
from tests.support.distributed import REPOSITORY

pa = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")

TEXTS = ["one \u00e9", "two\nlines", "three"]
"""6, 9 and 5 bytes of UTF-8, each with an end of document: 23 tokens."""
ROWS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS, ensure_ascii=False).encode()
OBJECT = json.dumps(ROWS[0], indent=2).encode()
TEXT = "one \u00e9\n".encode()
BOM = b"\xef\xbb\xbf"

PAGE = REPOSITORY / "docs" / "data.md"
HEAD = "| input | file | documents | tokens |\n|---|---|---|---|\n"
REFUSED_HEAD = "| input | file | refused |\n|---|---|---|\n"


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


COMPRESSIONS: Mapping[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def parquet() -> bytes:
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), file)
    return file.getvalue()


def arrow(open_writer: Callable[..., Any]) -> bytes:
    file, table = io.BytesIO(), pa.Table.from_pylist(ROWS)
    with open_writer(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One row: files of a folder, and what becomes of them."""

    what: str
    files: Mapping[str, bytes]
    documents: int = 0
    tokens: int = 0
    refused: str = ""
    """Part of the message, for what is not read."""

    def row(self) -> str:
        """Return the row as it is in the page."""
        files = ", ".join(f"`{name}`" for name in self.files)
        return f"| {self.what} | {files} | " + (
            f"{self.refused} |\n" if self.refused else f"{self.documents} | {self.tokens} |\n"
        )


def read(what: str, name: str, data: bytes, documents: int = 3, tokens: int = 23) -> Kind:
    return Kind(what=what, files={name: data}, documents=documents, tokens=tokens)


def refused(what: str, name: str, data: bytes, message: str) -> Kind:
    return Kind(what=what, files={name: data}, refused=message)


PLAIN = [
    read("JSON lines", "a.jsonl", LINES),
    read("JSON lines named as one document", "a.json", LINES),
    read("JSON lines with a wrong suffix", "a.txt", LINES),
    read("JSON lines after a byte order mark", "a.json", BOM + LINES),
    read("JSON lines with Windows' line ends and blank lines", "a.ndjson", LINES.replace(b"\n", b"\r\n\r\n")),
    read("an array of objects", "a.json", ARRAY),
    read("an array after a byte order mark, with a wrong suffix", "a.txt", BOM + ARRAY),
    read("one object over several lines", "a.json", OBJECT, 1, 7),
    read("objects over several lines", "a.json", b"\n".join([OBJECT] * 3), 3, 21),
    read("text", "a.txt", TEXT, 1, 8),
    read("text after a byte order mark", "a.txt", BOM + TEXT, 1, 8),
    read("code", "a.c", b"{\n  int x;\n}\n", 1, 14),
    read("a Parquet table", "a.parquet", parquet()),
    read("a Parquet table with a wrong suffix", "a.json", parquet()),
    read("an Arrow file", "a.arrow", arrow(pa.ipc.new_file)),
    read("an Arrow stream", "a.arrow", arrow(pa.ipc.new_stream)),
]
"""Each of them also compressed, in every way."""

OTHERS = [
    read("compressed twice over, one part after the other", "a.jsonl.gz", gzip.compress(LINES) * 2, 6, 46),
    read("compressed, with a name that does not say so", "a.jsonl", zstd(LINES)),
    Kind(what="an empty file beside others", files={"a.jsonl": LINES, "b.jsonl": b""}, documents=3, tokens=23),
    Kind(
        what="an empty file, compressed, beside others",
        files={"a.jsonl": LINES, "b.jsonl.gz": gzip.compress(b"")},
        documents=3,
        tokens=23,
    ),
    Kind(
        what="records without text beside others",
        files={"a.jsonl": LINES, "b.jsonl": b'{"text": ""}\n'},
        documents=3,
        tokens=23,
    ),
    Kind(
        what="a folder with a mixture",
        files={
            "a.json.zst": zstd(LINES),
            "b/c.json": ARRAY,
            "b/d.parquet": parquet(),
            "b/e.md": TEXT,
            "f.arrow.gz": gzip.compress(arrow(pa.ipc.new_stream)),
            ".hidden": b"\0",
        },
        documents=13,
        tokens=100,
    ),
]

REFUSED = [
    refused("truncated gzip", "a.jsonl.gz", gzip.compress(LINES * 99)[:-9], "gzip data is truncated"),
    refused("truncated zstd", "a.jsonl.zst", zstd(LINES * 99)[:-9], "zstd data is truncated"),
    refused("a truncated array", "a.json", ARRAY[:-1], "the end of the array is missing"),
    refused("a truncated last line", "a.jsonl", LINES[:-5], "not JSON"),
    refused("a truncated Parquet table", "a.parquet", parquet()[:-9], "not a readable Parquet file"),
    refused("a name that promises a compression", "a.jsonl.gz", LINES, "not gzip data although the name ends in .gz"),
    refused("a compression that is not read", "a.jsonl.lz4", b"\x04\x22\x4d\x18" + LINES, "lz4 data"),
    refused("a name that promises JSON", "a.json", b"# no JSON\n", "not JSON although its name promises that"),
    refused("records with another key", "a.jsonl", b'{"body": "x"}\n', "no key 'text'"),
    refused("an array of strings", "a.json", b'["a", "b"]', "a JSON array of strings"),
    refused("UTF-16", "a.txt", TEXT.decode().encode("utf-16"), "UTF-16 or UTF-32 text"),
    refused("Latin-1", "a.txt", "caf\u00e9".encode("latin-1"), "not valid UTF-8"),
    refused("an archive", "a.zip", b"PK\x03\x04" + LINES, "a zip archive"),
    refused("token ids, without --format tokens", "a.npy", b"\1\0\2\0", "token ids or other numbers"),
    refused("a table in CSV", "a.csv", b"id,text\n1,one\n", "a table of comma-separated values (CSV)"),
    refused("a table in TSV", "a.tsv", b"id\ttext\n1\tone\n", "a table of tab-separated values (TSV)"),
    refused("HTML", "a.htm", b"<p>one</p>\n", "HTML, as its name says"),
    refused("HTML with another suffix", "a.txt", BOM + b"\n<!DOCTYPE html><p>one", "HTML, as its first bytes say"),
    refused("XML", "a.feed", b"<?xml version='1.0'?><a>one</a>", "XML, as its first bytes say"),
    refused("SVG", "a.svg", b"<svg><text>one</text></svg>", "SVG, as its first bytes say"),
    refused("RTF", "a.doc", b"{\\rtf1 one}", "RTF, as its first bytes say"),
    refused("PDF, with a zero byte or without", "a.pdf", b"%PDF-1.4\nBT (one) Tj ET\n", "PDF, as its first bytes say"),
    refused("PostScript", "a.eps", b"%!PS-Adobe-3.0\n(one) show\n", "PostScript, as its first bytes say"),
    refused("a web archive", "a.gz", gzip.compress(b"WARC/1.0\r\none"), "a web archive (WARC), as its first bytes say"),
    refused("a text with a zero byte, wherever it is", "a.txt", b"one\n" * 9999 + b"\0", "binary data"),
    refused("a picture", "a.png", b"\x89PNG\0", "binary data"),
    refused("an empty file alone", "a.jsonl", b"", "no document with text was found"),
]


def put(folder: Path, kind: Kind, ways: Mapping[str, Callable[[bytes], bytes]]) -> Path:
    """Write a row's files, once in each way."""
    for suffix, pack in ways.items():
        for name, data in kind.files.items():
            path = folder / (name + suffix)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pack(data))
    return folder


def identity(kind: Kind) -> str:
    return kind.what


@pytest.mark.parametrize("kind", [*PLAIN, *OTHERS], ids=identity)
def test_a_kind_of_input_becomes_the_documents_and_tokens_of_the_table(tmp_path: Path, kind: Kind) -> None:
    all_ways = [{"": bytes}, *([COMPRESSIONS] if kind in PLAIN else [])]
    for number, ways in enumerate(all_ways):
        prefix = tmp_path / f"corpus{number}"
        facts = make(put(tmp_path / f"in{number}", kind, ways), prefix).sidecar
        assert (facts["documents"], facts["tokens"]) == (kind.documents * len(ways), kind.tokens * len(ways))
        texts = read_texts(prefix)
        assert sum(len(text.encode()) + 1 for text in texts) == facts["tokens"]
        assert not any("\ufeff" in text for text in texts)


@pytest.mark.parametrize("kind", REFUSED, ids=identity)
def test_a_kind_of_input_that_is_not_read_is_named_and_nothing_is_written(tmp_path: Path, kind: Kind) -> None:
    with pytest.raises(UserError, match=re.escape(kind.refused)) as refusal:
        make(put(tmp_path / "in", kind, {"": bytes}), tmp_path / "corpus")
    if "no document" not in kind.refused:
        assert f"{tmp_path}/in/{next(iter(kind.files))}" in str(refusal.value)
    assert os.listdir(tmp_path) == ["in"]


def test_the_documentation_has_the_table() -> None:
    table = HEAD + "".join(kind.row() for kind in [*PLAIN, *OTHERS])
    assert table in PAGE.read_text(encoding="utf-8"), f"put this table into {PAGE}:\n{table}"
    table = REFUSED_HEAD + "".join(kind.row() for kind in REFUSED)
    assert table in PAGE.read_text(encoding="utf-8"), f"put this table into {PAGE}:\n{table}"
