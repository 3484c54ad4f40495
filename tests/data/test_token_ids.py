# SPDX-License-Identifier: Apache-2.0
"""Files of token ids (.npy, with a header and without) become corpora, as ids of the tokenizer that they are of."""

import gzip
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.cli.main import main
from megatron_ext.data import token_ids
from megatron_ext.data.discover import find_sources
from megatron_ext.data.encode import encode_batch
from megatron_ext.data.output import read_sidecar
from megatron_ext.data.readers import read_documents
from megatron_ext.data.tokenizers import ByteTokenizer, TokenizerSpec
from megatron_ext.errors import UserError
from tests.support.corpus import make, make_tokenizer, read_corpus, write_json_lines

EOD = 256
DOCUMENTS = [[1, 2, EOD], [3, EOD], [*range(100, 150), EOD]]
IDS = [token for document in DOCUMENTS for token in document]


def raw(ids: list[int], dtype: str = "uint32") -> bytes:
    return np.array(ids, dtype=dtype).tobytes()


def with_header(ids: list[int], dtype: str) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(ids, dtype=dtype))
    return file.getvalue()


def write_record(prefix: Path, **changes: object) -> None:
    """Write the record of shards of bytes."""
    facts = {"format": token_ids.SHARDS_FORMAT, "dtype": "uint32", "vocab_size": 257, "eod": EOD, "tokenizer": None}
    record = {**facts, "tokenizer_digests": {"tokens": "bytes"}, **changes}
    token_ids.record_path(str(prefix)).write_text(json.dumps(record))


@pytest.mark.parametrize("at_once", [1, 2, 7, 1 << 22])
def test_shards_become_one_corpus_wherever_they_are_cut_while_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(token_ids, "_IDS_AT_ONCE", at_once)
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "t_000_000000.npy").write_bytes(raw(IDS))
    (folder / "t_000_000001.npy").write_bytes(with_header(IDS, "int64"))
    (folder / "t_001_000000.npy").write_bytes(gzip.compress(raw(IDS)))
    # A document that a shard cuts ends there, and one without ids is none.
    (folder / "t_001_000001.npy").write_bytes(raw([7, EOD, EOD, 8]))
    write_record(folder / "t_")
    command = ["data", "prepare", str(folder), "--format", "tokens", "--output-prefix", str(tmp_path / "corpus")]
    assert main(command) == 0
    assert read_corpus(tmp_path / "corpus") == [*DOCUMENTS * 3, [7, EOD], [8, EOD]]
    facts = read_sidecar(tmp_path / "corpus")
    assert facts["skipped"] == {"empty document": 1, "not matching --glob": 1}
    assert facts["megatron_args"] == ["--tokenizer-type", "NullTokenizer", "--vocab-size", "257"]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "int32", "int64"])
def test_ids_of_any_type_make_the_corpus_that_their_texts_make(tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("transformers", reason="the extra `data` is not installed")
    spec = TokenizerSpec(folder=str(make_tokenizer(tmp_path / "tokenizer")))
    texts = ["def main return", "self hello", "world \u00e9"]
    make(write_json_lines(tmp_path / "in.jsonl", texts), tmp_path / "texts", tokenizer=spec)
    ids = [token for document in read_corpus(tmp_path / "texts") for token in document]
    (tmp_path / "ids.npy").write_bytes(raw(ids, dtype))
    made = make(tmp_path / "ids.npy", tmp_path / "ids", file_format="tokens", token_dtype=dtype, tokenizer=spec)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ids.{suffix}").read_bytes() == (tmp_path / f"texts.{suffix}").read_bytes()
    assert (made.sidecar["documents"], made.sidecar["text_bytes"]) == (3, 0)


def test_several_processes_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "a_000_000000.npy").write_bytes(raw(IDS * 50))
    write_record(tmp_path / "a_")
    for workers in (1, 2):
        shard = tmp_path / "a_000_000000.npy"
        make(shard, tmp_path / f"by{workers}", file_format="tokens", workers=workers)
    assert (tmp_path / "by1.bin").read_bytes() == (tmp_path / "by2.bin").read_bytes()


@pytest.mark.parametrize(
    ("data", "record", "dtype", "message"),
    [
        (raw(IDS), None, "uint32", "nothing says which tokenizer its ids are of, .*; give --tokenizer"),
        (raw(IDS), {"eod": 5}, None, r"its ids are of bytes \(.*t_shards.json\), not of bytes \(no --tokenizer\)"),
        (raw(IDS), {"tokenizer_digests": {"tokens": "x"}, "tokenizer": "/t"}, None, "are of the tokenizer /t"),
        (raw(IDS), {}, "uint16", "--token-dtype is uint16, but .*t_shards.json says uint32; leave that option out"),
        (raw(IDS), {"dtype": "float32"}, None, "t_shards.json: is not a record of token shards"),
        (raw(IDS)[:-1], {}, None, "ends in the middle of an id of 4 bytes: it is truncated, or --token-dtype"),
        (raw([1, 257, EOD]), {}, None, r"\(document 1\): has the id 257, and the tokenizer has 257; give the one"),
        (raw([1, -1, EOD], "int32"), {"dtype": "int32"}, None, "has the id -1"),
        (with_header(IDS, "int32"), {}, "int64", "--token-dtype is int64, but its header says int32"),
        (with_header(IDS, "float32"), {}, None, "its header says float32 of shape .*, not one row of ids"),
        (raw([EOD]), {}, None, "no document with text was found in the input"),
        (raw(IDS * 9, "uint16"), {"dtype": "uint32"}, None, "has the id .*, and the tokenizer has 257"),
    ],
)
def test_ids_of_another_tokenizer_or_type_are_refused_and_nothing_is_written(
    tmp_path: Path, data: bytes, record: dict[str, object] | None, dtype: str | None, message: str
) -> None:
    (tmp_path / "t_000_000000.npy").write_bytes(data)
    if record is not None:
        write_record(tmp_path / "t_", **record)
    with pytest.raises(UserError, match=message):
        shard = tmp_path / "t_000_000000.npy"
        make(shard, tmp_path / "corpus", file_format="tokens", token_dtype=dtype)
    assert not list(tmp_path.glob("corpus*"))


class Words(ByteTokenizer):
    """Bytes with more ids, as a tokenizer has them whose record is not beside the shards."""

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size, self.eod = vocab_size, eod


SMALL = [*range(1, 31), 0] * 20
NARROW = "uint16 holds no id above 65,535, and the tokenizer has 70,002"


@pytest.mark.parametrize(
    ("data", "dtype", "tokenizer", "message"),
    [
        # Where 0 ends documents, halves of ids would make documents of one id each.
        (raw(SMALL), "uint16", (500, 0), "every second id is 0 if they are uint16, as if they were of a wider type"),
        (raw(SMALL, "int64"), "uint32", (500, 0), "every second id is 0 if they are uint32"),
        (raw(SMALL, "int64"), "uint16", (500, 499), "every second id is 0 if they are uint16"),
        (gzip.compress(raw(SMALL)), "uint16", (500, 0), "every second id is 0 if they are uint16"),
        (raw(SMALL, "uint16"), "uint32", (500, 0), "none of its 310 ids is the end of document"),
        (raw(SMALL, "uint16"), "uint16", (70_002, 9), NARROW),
        (with_header(SMALL, "uint16"), None, (70_002, 9), NARROW),
        (raw([1, 2, 3] * 20), "uint32", (500, 499), r"none of its 60 ids is the end of document \(499\)"),
        (with_header([1, 2, 3], "uint32"), None, (500, 499), r"none of its 3 ids is the end of document \(499\)"),
    ],
    # Without the bytes: those of gzip have a time.
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_what_bytes_cannot_be_as_the_given_type_is_refused(
    tmp_path: Path, data: bytes, dtype: str | None, tokenizer: tuple[int, int], message: str
) -> None:
    ids = tmp_path / "ids.npy"
    ids.write_bytes(data)
    (source,) = find_sources([ids], file_format="tokens").files
    words = Words(*tokenizer)
    items = list(read_documents(source, token_dtype=dtype, vocab_size=words.vocab_size, eod=words.eod))
    problems = encode_batch(items, words, "text").problems
    assert re.search(message, str(problems[0])), problems
    assert str(problems[0]).startswith(f"{ids}")


def test_few_ids_and_every_type_that_is_right_are_taken(tmp_path: Path) -> None:
    words = Words(65_536, 0)
    for ids, dtype in (([5, 0], "uint16"), (SMALL, "uint16"), (SMALL, "uint32"), ([9, 0, 0, 8, 0], "int64")):
        path = tmp_path / f"{len(ids)}_{dtype}.npy"
        path.write_bytes(raw(ids, dtype))
        (source,) = find_sources([path], file_format="tokens").files
        items = list(read_documents(source, token_dtype=dtype, vocab_size=words.vocab_size, eod=words.eod))
        found = encode_batch(items, words, "text")
        assert found.problems == [] and found.lengths


def test_ids_without_a_type_name_the_option(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `data` is not installed")
    spec = TokenizerSpec(folder=str(make_tokenizer(tmp_path / "tokenizer")))
    (tmp_path / "ids.npy").write_bytes(raw(IDS))
    with pytest.raises(UserError, match=r"without a header, and without a record .*; --token-dtype says which type"):
        make(tmp_path / "ids.npy", tmp_path / "corpus", file_format="tokens", tokenizer=spec)


def test_ids_are_not_taken_for_anything_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for data in (raw(IDS), with_header(IDS, "int32"), b"text in such a file"):
        (tmp_path / "ids.npy").write_bytes(data)
        assert main(["data", "prepare", str(tmp_path / "ids.npy"), "--output-prefix", str(tmp_path / "corpus")]) == 2
        assert "ids.npy: token ids or other numbers (.npy); --format tokens reads ids" in capsys.readouterr().err
    command = ["data", "prepare", "x", "--token-dtype", "uint16", "--output-prefix", "y"]
    assert main(command) == 2
    assert "--token-dtype uint16: is for --format tokens" in capsys.readouterr().err
