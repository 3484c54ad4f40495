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
