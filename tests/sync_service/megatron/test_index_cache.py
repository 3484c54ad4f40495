# SPDX-License-Identifier: Apache-2.0
"""Peers that begin at one time on one corpus find whole indices."""

import fcntl
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

from megatron_ext.patching import PatchRegistry
from megatron_ext.sync_service.megatron import index_cache
from tests.support.distributed import CONTEXT, warm_up
from tests.support.waiting import until

SAMPLES, SEQUENCE = 200_000, 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("corpus") / "corpus"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for length in range(1, 200):
        builder.add_document(numpy.arange(length), [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    registry = PatchRegistry()
    registry.apply(index_cache.patches())
    yield
    registry.revert()


def build(prefix: str, cache: Path | None) -> GPTDataset:
    tokenizer = SimpleNamespace(eod=0, pad=0, vocab_size=300, unique_identifiers={"class": "none"})
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQUENCE,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=None if cache is None else str(cache),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=tokenizer,
        mid_level_dataset_surplus=0.005,
    )
    documents = IndexedDataset(prefix)
    indices = numpy.arange(len(documents.document_indices) - 1, dtype=numpy.int32)
    return GPTDataset(documents, prefix, indices, SAMPLES, Split.train, config)


def peer(prefix: str, cache: Path | None, said: Path, seconds: float = 0.0) -> None:
    """Build, and read samples: a process that fails, or is killed, says so by its exit code."""
    sys.stdout = said.open("a", buffering=1)
    PatchRegistry().apply(index_cache.patches())
    time.sleep(seconds)
    dataset = build(prefix, cache)
    for number in range(0, SAMPLES, 5000):
        assert len(dataset[number]["tokens"]) == SEQUENCE


def test_no_peer_reads_indices_that_another_one_is_writing(corpus: str, tmp_path: Path):
    # Without the lock two in three of such rounds failed.
    warm_up()
    places, said = random.Random(0), tmp_path / "said"
    for _ in range(8):
        delays = [places.random() / 25 for _ in range(6)]
        peers = [CONTEXT.Process(target=peer, args=(corpus, tmp_path / "cache", said, delay)) for delay in delays]
        for process in peers:
            process.start()
        for process in peers:
            process.join()
        assert [process.exitcode for process in peers] == [0] * 6
        shutil.rmtree(tmp_path / "cache")


@pytest.mark.parametrize("beside_corpus", [True, False], ids=["beside the corpus", "in data-cache-path"])
def test_a_peer_waits_for_another_that_builds_and_says_so(corpus: str, tmp_path: Path, beside_corpus: bool):
    warm_up()
    said = tmp_path / "said"
    said.touch()
    cache = None if beside_corpus else tmp_path / "cache"
    folder = Path(corpus, "cache", "GPTDataset_indices") if beside_corpus else tmp_path / "cache"
    folder.mkdir(parents=True)
    with (folder / index_cache.LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = CONTEXT.Process(target=peer, args=(corpus, cache, said))
        process.start()
        line = f"another job builds or reads indices in {folder}; this one waits until it is done"
        until(lambda: line in said.read_text(), "the line")
        assert [file.name for file in folder.iterdir()] == [index_cache.LOCK_NAME]
        fcntl.flock(lock, fcntl.LOCK_UN)
    process.join()
    assert process.exitcode == 0 and len(list(folder.glob("*.npy"))) == 3


def test_indices_in_a_folder_that_cannot_be_written_are_read(corpus: str, tmp_path: Path, monkeypatch):
    build(corpus, tmp_path / "cache")
    (tmp_path / "cache" / index_cache.LOCK_NAME).unlink()

    def refuse(*_args: object) -> int:
        raise PermissionError(13, "Permission denied")

    # As root, who may write everywhere, there is no such folder.
    monkeypatch.setattr(index_cache.os, "open", refuse)
    assert len(build(corpus, tmp_path / "cache")) >= SAMPLES


def test_a_file_system_without_locks_is_named(corpus: str, tmp_path: Path, monkeypatch, capsys):
    def refuse(*_args: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(index_cache.fcntl, "flock", refuse)
    assert len(build(corpus, tmp_path / "cache")) >= SAMPLES
    assert "this file system has no locks (Operation not supported)" in capsys.readouterr().out
