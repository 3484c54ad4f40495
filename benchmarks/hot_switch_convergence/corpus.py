# SPDX-License-Identifier: Apache-2.0
"""The study's documents, in the forms in which its methods read them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.hot_switch_convergence.settings import CONTEXT, HotSwitchStudy
from megatron_ext.hot_switch.data.padded_corpus import whole_rows
from tests.support.distributed import REPOSITORY

__all__ = ["HELD_OUT", "prepare_corpus", "quickstart", "rows_of_pieces", "write_documents"]

Tokens = npt.NDArray[np.integer]

HELD_OUT = 0.05
"""Part of the documents, the last ones, that Megatron splits off for validation."""


def prepare_corpus(study: HotSwitchStudy) -> None:
    """Cut the standard library into functions and classes, and tokenize them, unless that was done."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    if not study.corpus.with_suffix(".idx").exists():
        study.output.mkdir(parents=True, exist_ok=True)
        quickstart().prepare(study.output)
    corpus = IndexedDataset(str(study.corpus))
    documents = [corpus[number] for number in range(len(corpus))]
    first = round((1 - HELD_OUT) * len(documents))
    forms: dict[Path, Iterable[Tokens]] = {
        study.held_out: (row for tokens in documents[first:] for row in rows_of_pieces(tokens)),
        study.padded: (whole_rows(tokens, CONTEXT) for tokens in documents[:first]),
        study.validation: documents[first:],
    }
    for prefix, some in forms.items():
        index = prefix.with_suffix(".idx")
        if not index.exists() or index.stat().st_mtime < study.corpus.with_suffix(".idx").stat().st_mtime:
            write_documents(prefix, some, corpus.index.dtype)


def write_documents(prefix: Path, documents: Iterable[Tokens], kind: Any) -> None:
    """Write documents as Megatron reads them."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=kind)
    for tokens in documents:
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def rows_of_pieces(tokens: Tokens) -> list[Tokens]:
    """Return a document cut into pieces, each filled up to a row: none is predicted into the next one."""
    pieces = [tokens[at : at + CONTEXT - 1] for at in range(0, len(tokens), CONTEXT - 1)]
    return [whole_rows(np.append(piece, tokens[-1]), CONTEXT) for piece in pieces]


def quickstart() -> ModuleType:
    """Return the quickstart of hot switching, whose corpus this is."""
    path = REPOSITORY / "examples" / "hot_switch" / "quickstart.py"
    spec = importlib.util.spec_from_file_location("hot_switch_quickstart", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
