# SPDX-License-Identifier: Apache-2.0
"""Compressed files come back whole, or end with an error: nothing behind a stream is lost without a word."""

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.cli.main import main
from megatron_ext.data.compression import DamagedData, compression_of, opened
from tests.support.corpus import make, read_texts

FIRST, SECOND = b"one\n" * 30_000, b"two\n" * 30_000
PACKERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}


def zstd(data: bytes) -> bytes:
    pa = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


def skippable(size: int) -> bytes:
    """Return a frame of zstd that holds no data, as pzstd writes one first."""
    return b"\x50\x2a\x4d\x18" + size.to_bytes(4, "little") + bytes(size)


def unpacked(data: bytes) -> bytes:
    compression = compression_of(data[:12])
    assert compression is not None
    raw: io.BufferedReader[io.BytesIO] = io.BufferedReader(io.BytesIO(data))
    with opened(raw, compression, "file") as stream:
        return stream.read()


@pytest.mark.parametrize("pack", [*PACKERS.values(), zstd], ids=[*PACKERS, "zstd"])
def test_streams_one_after_the_other_are_all_read(pack: Callable[[bytes], bytes]) -> None:
    assert unpacked(pack(FIRST) + pack(b"") + pack(SECOND)) == FIRST + SECOND
    assert unpacked(b"".join(pack(b"%d\n" % number) for number in range(300))).split() == [
        b"%d" % number for number in range(300)
    ]


@pytest.mark.parametrize(
    "damage",
    [
        lambda second: b"x",
        lambda second: b"some text",
        lambda second: b"\xff" * 100_000,
        lambda second: second[:3],
        lambda second: second[:-1],
        lambda second: second[:4] + b"\xff" * 8 + second[12:],
        lambda second: b"x" + second,
    ],
    ids=["a byte", "text", "bytes", "cut early", "cut late", "damaged stream", "stream behind a byte"],
)
@pytest.mark.parametrize("pack", [*PACKERS.values(), zstd], ids=[*PACKERS, "zstd"])
def test_what_cannot_be_read_behind_a_whole_stream_is_an_error(
    pack: Callable[[bytes], bytes], damage: Callable[[bytes], bytes]
) -> None:
    with pytest.raises(DamagedData, match=r"data is (truncated|corrupt)"):
        unpacked(pack(FIRST) + damage(pack(bytes(range(256)) * 9)))


def test_zero_bytes_after_a_stream_are_what_each_format_says() -> None:
    assert unpacked(lzma.compress(FIRST) + bytes(8) + lzma.compress(SECOND) + bytes(100_000)) == FIRST + SECOND
    assert unpacked(gzip.compress(FIRST) + bytes(7)) == FIRST
    for data in (lzma.compress(FIRST) + bytes(7), bz2.compress(FIRST) + bytes(4), zstd(FIRST) + bytes(4)):
        with pytest.raises(DamagedData, match="data is corrupt"):
            unpacked(data)


def test_frames_of_zstd_that_hold_no_data_are_passed_over() -> None:
    data = skippable(8) + zstd(FIRST) + skippable(0) + zstd(SECOND) + skippable(100_000)
    assert unpacked(data) == FIRST + SECOND
    with pytest.raises(DamagedData, match="zstd data is truncated"):
        unpacked(data[:-3])


@pytest.mark.parametrize("name", ["lines.jsonl.bz2", "lines.jsonl.xz", "lines.jsonl.gz", "text.txt.bz2", "text.txt.xz"])
def test_a_file_whose_second_stream_is_damaged_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    pack = {"bz2": bz2.compress, "xz": lzma.compress, "gz": gzip.compress}[name.rsplit(".", 1)[1]]
    data = pack(b'{"text": "one"}\n')
    (tmp_path / name).write_bytes(data + data[:-4])
    assert main(["data", "prepare", str(tmp_path / name), "--output-prefix", str(tmp_path / "corpus")]) == 2
    assert f"{tmp_path / name}" in (error := capsys.readouterr().err) and "data is truncated" in error


BROTLI = bytes.fromhex("0b0280") + b"hello\x03"
"""What brotli makes of `hello`."""


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("a.jsonl.lz4", b"\x04\x22\x4d\x18\x64\x40\xa7" + FIRST[:9], "lz4 data, as its first bytes say"),
        ("no suffix", b"\x02\x21\x4c\x18" + FIRST[:9], "lz4 data, as its first bytes say"),
        ("a.jsonl.Z", b"\x1f\x9d\x90" + FIRST[:9], "compress data, as its first bytes say"),
        ("a.jsonl", b"\x1f\x9d\x90" + FIRST[:9], "compress data, as its first bytes say"),
        ("a.jsonl.lz", b"LZIP\x01\x0c" + FIRST[:9], "lzip data, as its first bytes say"),
        ("a.jsonl.br", BROTLI, "brotli data, as its name says (.br)"),
        ("a.JSONL.BR", BROTLI, "brotli data, as its name says (.BR)"),
        ("a.lzma", lzma.compress(FIRST, lzma.FORMAT_ALONE), "lzma data, as its name says (.lzma)"),
    ],
)
@pytest.mark.parametrize("file_format", ["auto", "text", "jsonl"])
def test_what_is_compressed_in_a_way_that_is_not_read_is_said_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, data: bytes, what: str, file_format: str
) -> None:
    (tmp_path / name).write_bytes(data)
    prefix = str(tmp_path / "out" / "c")
    arguments = ["data", "prepare", str(tmp_path), "--format", file_format, "--output-prefix", prefix]
    (tmp_path / "out").mkdir()
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert f"{name}: {what}, which is not read; decompress the file, or pack it again with gzip, bzip2, xz" in said


def test_several_files_that_are_compressed_in_such_ways_are_named_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "a.lz4").write_bytes(b"\x04\x22\x4d\x18" + FIRST[:9])
    (tmp_path / "b.br").write_bytes(BROTLI)
    assert main(["data", "prepare", str(tmp_path), "--output-prefix", str(tmp_path / "c")]) == 2
    said = capsys.readouterr().err
    assert "2 files compressed in ways that are not read (" in said
    assert "): decompress, or pack again with gzip, bzip2, xz or zstd; leave them out (--exclude" in said


def test_a_text_is_read_whatever_compression_its_name_ends_like(tmp_path: Path) -> None:
    texts = {"notes.br": "Demat d'an holl\n", "table.z": "\u00e9\t1\n", "x.lz": "LZIP is a format\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        make(tmp_path / name, tmp_path / "corpus", overwrite=True)
        assert read_texts(tmp_path / "corpus") == [text]
