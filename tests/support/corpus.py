# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of the data preparation: run it, read the result back with Megatron, make a tokenizer."""

import gzip
import io
import json
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings

from megatron_ext.data.documents import Document
from megatron_ext.data.prepare import PrepareConfig, Prepared, prepare
from megatron_ext.quietly import quietly

EOS = "<|endoftext|>"

# Time limits that only a busy machine breaks: the first example also builds hypothesis' table of characters.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def make(inputs: Path | Iterable[Path], prefix: Path, **settings: Any) -> Prepared:
    """Prepare a corpus without a progress line on the tests' output."""
    paths = (inputs,) if isinstance(inputs, Path) else tuple(inputs)
    config = PrepareConfig(inputs=paths, output_prefix=str(prefix), **settings)
    return prepare(config, progress_stream=io.StringIO())


def read_corpus(prefix: Path) -> list[list[int]]:
    """Return every document's tokens, as Megatron's own reader sees them."""
    with quietly():
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        dataset = IndexedDataset(str(prefix))
    # One sequence per document: that is how GPT data is stored.
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[index].tolist() for index in range(len(dataset))]


def read_texts(prefix: Path) -> list[str]:
    """Return every document's text of a byte-level corpus; each must end with the end-of-document id."""
    texts = []
    for tokens in read_corpus(prefix):
        assert tokens[-1] == 256
        texts.append(bytes(tokens[:-1]).decode("utf-8"))
    return texts


def write_json_lines(path: Path, texts: Iterable[str], *, key: str = "text") -> Path:
    """Write one JSON object per text, gzipped if the name says so."""
    data = "".join(json.dumps({"id": index, key: text}) + "\n" for index, text in enumerate(texts)).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_without_record(prefix: Path, documents: Iterable[Iterable[int]], dtype: type = np.int32) -> str:
    """Write a corpus of token ids as Megatron's preprocess_data.py does: without a record. Return its prefix."""
    with quietly():
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        tokens = np.array(list(document), dtype=dtype)
        builder.add_document(tokens, [tokens.size])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def text_document(payload: bytes | str, *, is_json: bool = False, position: str = "") -> Document:
    """Return a document as a reader would yield it."""
    size = len(payload)
    return Document(path="f", position=position, payload=payload, is_json=is_json, source_bytes=size)


def make_tokenizer(
    folder: Path,
    *,
    post_processor: Any = None,
    vocab_size: int = 300,
    texts: Iterable[str] = ("def main return import self hello world " * 4,) * 10,
    **config: Any,
) -> Path:
    """Train a tiny byte-level BPE tokenizer and save it as a Hugging Face folder.

    Args:
        folder: Where to; made here.
        vocab_size: Most ids that it has.
        texts: What it is trained on.
        post_processor: What the tokenizer adds around every text.
        config: Further entries of tokenizer_config.json; `eos_token=None` leaves the end-of-text token out.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, **config}
    content = {key: value for key, value in content.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def run_in_child(job: Callable[[], object]) -> int:
    """Run a function in a forked process and return how that ended: exit status, or minus the signal.

    Forked, so that what the tests imported (Megatron) is there at once.
    """
    with warnings.catch_warnings():
        # Forking beside threads is warned of; the job leaves the threads alone.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            job()
        except BaseException:  # a child must never return into pytest
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
