# SPDX-License-Identifier: Apache-2.0
"""Documents to tokens, alone and in several processes."""

import itertools
import json
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext.data import encode
from megatron_ext.data.documents import Document, Item, Problem, Skipped
from megatron_ext.data.encode import encode_all, encode_batch, text_of
from megatron_ext.data.tokenizers import BYTE_EOD, ByteTokenizer, TokenizerSpec
from megatron_ext.errors import UserError
from tests.support.corpus import text_document, unhurried


def json_document(payload: bytes) -> Document:
    return text_document(payload, is_json=True, position="line 7")


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b'{"text": "x"', "f:7: not JSON: Expecting ',' delimiter at column 13"),
        (b'{"text": "x', "f:7: not JSON: Unterminated string starting at column 10"),
        (b'["text"]', "f:7: JSON array where an object with the key 'text' is expected"),
        (b"3", "f:7: JSON number where an object with the key 'text' is expected"),
        (b'{"body": 1, "id": 2}', "f:7: no key 'text'; keys are 'body', 'id' (--jsonl-key)"),
        (b"{}", "f:7: no key 'text'; keys are none (--jsonl-key)"),
        (b'{"text": null}', "f:7: key 'text' holds null, not a string"),
        (b'{"text": ["a"]}', "f:7: key 'text' holds array, not a string"),
        (b'{"text": "caf\xe9"}', "f:7: not valid UTF-8: byte 0xe9 at offset 13 of the line"),
        (b'{"text": "ab\\ud83d"}', "f:7: key 'text' holds half a surrogate pair at character 2"),
        (b"[" * 200_000, "f:7: not usable JSON: "),
        (b'{"text": ' + b"9" * 5000 + b"}", "f:7: key 'text' holds number, not a string"),
    ],
)
def test_an_unusable_json_line_is_told_with_its_place_and_reason(payload: bytes, message: str) -> None:
    problem = text_of(json_document(payload), "text")
    assert isinstance(problem, Problem)
    assert str(problem).startswith(message)


def test_invalid_utf8_in_a_text_names_line_byte_and_offset() -> None:
    problem = text_of(text_document(b"one\ntwo\ncaf\xe9 four\n"), "text")
    assert str(problem) == "f:3: not valid UTF-8: byte 0xe9 at offset 11 of the file"


def test_a_json_line_too_long_for_one_document_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "MAX_DOCUMENT_BYTES", 20)  # the real limit is 2 GiB
    assert isinstance(text_of(json_document(b'{"text": "123456789"}'), "text"), Problem)
    assert text_of(json_document(b'{"text": "12345678"}'), "text") == "12345678"


@unhurried
@given(payload=st.binary(), is_json=st.booleans())
def test_any_bytes_give_a_text_that_is_valid_unicode_or_a_problem(payload: bytes, is_json: bool) -> None:
    text = text_of(text_document(payload, is_json=is_json), "text")
    if isinstance(text, str):
        text.encode("utf-8")


@unhurried
@given(st.dictionaries(st.sampled_from(["text", "id"]), st.text() | st.integers() | st.none()))
def test_a_json_string_comes_back_as_it_was(row: dict[str, object]) -> None:
    text = text_of(json_document(json.dumps(row).encode()), "text")
    assert text == row["text"] if isinstance(row.get("text"), str) else isinstance(text, Problem)


@unhurried
@given(st.lists(st.text()))
def test_tokens_turn_back_into_the_texts(texts: list[str]) -> None:
    tokenizer = ByteTokenizer()
    batch = encode_batch([text_document(text) for text in texts], tokenizer, "text")
    kept = [text for text in texts if text]
    assert sum(batch.lengths) == batch.tokens.size
    assert batch.tokens.dtype == np.uint16
    ends = np.cumsum(batch.lengths, dtype=np.int64)
    documents = np.split(batch.tokens, ends[:-1]) if kept else []
    assert [tokenizer.decode(document) for document in documents] == kept
    assert [int(document[-1]) for document in documents] == [BYTE_EOD] * len(kept)
    assert batch.text_bytes == sum(len(text.encode()) for text in kept)
    assert len(batch.skipped) == len(texts) - len(kept)


class EndsItself:
    """A tokenizer that puts the end-of-document id itself, as some of Hugging Face's do."""

    vocab_size = 70_000
    eod = 5

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [np.array([*(69_999 for _ in text.strip()), 5]) for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        raise NotImplementedError


def test_a_document_ends_with_exactly_one_end_of_document_id_and_large_ids_are_kept() -> None:
    batch = encode_batch([text_document("ab"), text_document("  "), text_document("c")], EndsItself(), "text")
    assert batch.tokens.dtype == np.int32
    assert batch.tokens.tolist() == [69_999, 69_999, 5, 69_999, 5]
    assert batch.lengths == [3, 2]
    assert batch.skipped == [Skipped(reason="empty document", path="f")]


def mixed_items(count: int) -> Iterator[Item]:
    for index in range(count):
        if index % 50 == 7:
            yield Problem(path=f"p{index}", position="", message="broken")
        else:
            yield text_document(f"document {index} " * (index % 90))


def test_several_processes_give_the_same_tokens_and_problems_in_the_same_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encode, "_BATCH_ITEMS", 50)  # many more batches than may be under way at once

    def run(workers: int) -> tuple[list[int], list[int], list[str], int]:
        batches = list(encode_all(mixed_items(2000), TokenizerSpec(), json_key="text", workers=workers))
        return (
            np.concatenate([batch.tokens for batch in batches]).tolist(),
            [length for batch in batches for length in batch.lengths],
            [problem.path for batch in batches for problem in batch.problems],
            sum(len(batch.skipped) for batch in batches),
        )

    assert run(1) == run(2)


def test_input_is_read_only_a_few_batches_ahead_of_what_is_used() -> None:
    taken = 0

    def endless() -> Iterator[Item]:
        nonlocal taken
        for _ in itertools.count():
            taken += 1
            yield text_document(b"x" * 100_000)

    batches = encode_all(endless(), TokenizerSpec(), json_key="text", workers=2)
    for _ in range(3):
        next(batches)
    batches.close()
    assert taken <= 11 * (3 + 2 * 3)  # 11 documents make a batch; at most 3 in flight per process


def test_a_process_that_dies_ends_the_run_with_advice() -> None:
    def endless() -> Iterator[Item]:
        while True:
            yield text_document(b"x" * 100_000)

    batches = encode_all(endless(), TokenizerSpec(), json_key="text", workers=2)
    next(batches)
    os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    with pytest.raises(UserError, match=r"died .* use fewer --workers"):
        for _ in batches:
            pass


class DiesWhileItSends(TokenizerSpec):
    """Ends its process in the middle of a message to the pool."""

    def load(self) -> Any:
        frame = sys._getframe()
        while "result_queue" not in frame.f_locals:
            assert frame.f_back is not None
            frame = frame.f_back
        os.write(frame.f_locals["result_queue"]._writer.fileno(), struct.pack("!i", 1000) + b"a part")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_while_it_sends_does_not_hang_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_ext.data.tokenizing_processes._WATCH_SECONDS", 0.3)
    documents = itertools.repeat(text_document(b"x" * 100_000), 100)
    with pytest.raises(UserError, match=r"died .* use fewer --workers"):
        list(encode_all(documents, DiesWhileItSends(), json_key="text", workers=2))


ORPHAN_SCRIPT = """
import itertools, multiprocessing, os, signal
from megatron_ext.data.documents import Document
from megatron_ext.data.encode import encode_all
from megatron_ext.data.tokenizers import TokenizerSpec

document = Document(path="f", position="", payload=b"x" * 100_000, is_json=False, source_bytes=1)
batches = encode_all(itertools.repeat(document), TokenizerSpec(), json_key="text", workers=2)
next(batches)
print(*(process.pid for process in multiprocessing.active_children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_processes_of_a_killed_run_end_by_themselves() -> None:
    result = subprocess.run([sys.executable, "-c", ORPHAN_SCRIPT], capture_output=True, text=True, timeout=60)
    assert result.returncode == -signal.SIGKILL, result.stderr
    pids = [int(word) for word in result.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
