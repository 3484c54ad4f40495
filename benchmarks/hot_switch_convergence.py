# SPDX-License-Identifier: Apache-2.0
"""Validation losses of hot switching and of Megatron's own packed and padded training after as many tokens of a corpus.

    python -m benchmarks.hot_switch_convergence [--json FILE]

Trains a GPT of 1.0 M parameters on the functions and classes of Python's standard library, four processes each. All
keep documents apart in attention and positions. Packed rows cut documents anywhere; padded ones have one document each,
or a piece of a long one, as hot switching has them: as many in a step, which ones differs. All are validated on packed
rows, which begin anywhere in a document, and on documents that begin at their beginning. A run that is finished is not
made again. docs/hot-switch.md tells what came out.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.command_line import add_report_option, add_seeds_option, benchmark_parser, folder_for_output
from benchmarks.common import Case, print_table, report
from benchmarks.convergence.code import digest_of_code
from benchmarks.convergence.results import compare
from benchmarks.convergence.runs import (
    VALIDATION,
    Measured,
    digest_of,
    finished_runs,
    keep,
    make_missing_of,
    parameters_and_sources,
)
from benchmarks.convergence.settings import MODEL, TRAINING, Method, Run, Study
from megatron_ext.hot_switch.data.padded_corpus import whole_rows
from tests.support.distributed import REPOSITORY
from tests.support.presets import Options, command_line, toy_gpt
from tests.support.pretrain import run_pretrain

RANKS = 4
CONTEXT = 512

Tokens = npt.NDArray[np.integer]

# Stock packing: rows of CONTEXT tokens, cut out of one stream of documents.
STOCK = Method(
    name="stock",
    title="Megatron, packed",
    options={"micro_batch_size": 4, "global_batch_size": 16, "eval_iters": 9},
)
_BY_PIECE: Options = {
    "micro_batch_size": 1,
    "global_batch_size": 25,  # documents, or pieces of CONTEXT tokens of longer ones
    "eval_global_batch_size": 24,
    "eval_iters": 6,  # on 144 rows, as packed training
    "calculate_per_token_loss": True,
}
# Rows of one document or piece each, filled up. Processes split the model as home does for hot switching, because 25
# rows cannot be shared out among four: so the initial weights are the same, too.
PADDED = Method(
    name="padded",
    title="Megatron, padded",
    options={**_BY_PIECE, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
)
HOT = Method(
    name="hot",
    title="hot switching",
    options={
        **_BY_PIECE,
        "hot_switch_strategies": ["1,2,2", "4,1,1", "2,2,1"],
        "hot_switch_bucket_sizes": [CONTEXT, 256, 128, 0],
    },
    goal=1.02,
)

HELD_OUT = 0.05
"""Part of the documents, the last ones, that Megatron splits off for validation."""

_TOKENS_OF = {STOCK: 8177, PADDED: 8237}
"""Predicted in a step: what follows the end of a document, 550 tokens long on average, does not count."""

_STEPS_BY_PIECE = 0.99
"""For a packed one: a piece has 330 tokens to predict on average."""

_TOKENS = re.compile(r"iteration +\d+/.*tokens: (\d+)")


@dataclass(frozen=True, kw_only=True)
class HotSwitchStudy(Study):
    """Where everything is, and how long a run is."""

    iterations: int = 200
    evaluation: int = 50
    """Steps between evaluations where they are made of pieces."""

    methods: tuple[Method, ...] = (STOCK, PADDED, HOT)

    @property
    def corpus(self) -> Path:
        """Prefix of the tokenized corpus."""
        return self.output / "corpus" / "functions"

    @property
    def held_out(self) -> Path:
        """Prefix of the documents of it that nobody trains on, cut and padded to rows of their own."""
        return self.output / "corpus" / "held_out"

    @property
    def padded(self) -> Path:
        """Prefix of the other documents, padded to whole rows."""
        return self.output / "corpus" / "padded"

    @property
    def validation(self) -> Path:
        """Prefix of the documents that nobody trains on as they are: what Megatron splits off `corpus`."""
        return self.output / "corpus" / "validation"

    def arguments(self, run: Run) -> list[str]:
        """Return the command line of examples/pretrain_gpt.py."""
        is_stock = run.method is STOCK
        # Megatron takes other rows for every evaluation, and shuffles them by how many there are in all: all methods
        # have the same only where their evaluations are as many.
        when: Options = {
            "seed": run.seed,
            "train_iters": self.iterations if is_stock else round(_STEPS_BY_PIECE * self.iterations),
            "eval_interval": round(self.evaluation / _STEPS_BY_PIECE) if is_stock else self.evaluation,
            "log_interval": 1,
        }
        rows: Options = {
            "seq_length": CONTEXT,
            "max_position_embeddings": CONTEXT,
            # Stock packing keeps documents apart by these; hot switching does always, and validates by them.
            "reset_position_ids": True,
            "reset_attention_mask": True,
            "eod_mask_loss": True,
            "make_vocab_size_divisible_by": 2,  # for each tensor parallel rank: 258 rows and 260, of which 257 are used
        }
        data = self.data
        if run.method is PADDED:
            files: Options = {"train_data_path": str(self.padded), "valid_data_path": str(self.validation)}
            data = {**data, "data_path": None, "split": None, **files}
        return toy_gpt(MODEL, TRAINING, when, data, rows, run.method.options, self.overrides)

    def document_arguments(self, run: Run, rows: int, checkpoint: str) -> list[str]:
        """Return the command line that takes the loss of held-out documents: stock Megatron's, for all methods.

        Args:
            run: what was trained.
            rows: of held-out documents.
            checkpoint: its folder.
        """
        batch = int(str(STOCK.options["global_batch_size"]))
        evaluation: Options = {
            "skip_train": True,
            "train_iters": 1,
            "data_path": str(self.held_out),
            "split": f"1,{rows - 1},0",  # Megatron does not return from building a split without documents
            "eval_iters": max(1, (rows - 1) // batch),
            "eval_global_batch_size": batch,
            "load": checkpoint,
            "finetune": True,
            "no_load_optim": True,
            "no_load_rng": True,
        }
        return self.arguments(Run(method=STOCK, seed=run.seed)) + command_line(evaluation)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs that are missing, and report on all that there are."""
    options = parser().parse_args(arguments)
    study = HotSwitchStudy(output=options.output.resolve())
    wanted = [Run(method=method, seed=seed) for seed in options.seeds for method in study.methods]
    prepare_corpus(study)
    make_missing_of(study, wanted, make)
    report_on(study, wanted, options.seeds, options.json)
    return 0


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


def make(study: HotSwitchStudy, run: Run) -> Measured:
    """Train, and write down what was measured once all is known."""
    begin = time.monotonic()
    arguments = study.arguments(run)
    with tempfile.TemporaryDirectory() as folder:
        saves = command_line({"save": folder, "save_interval": int(arguments[arguments.index("--train-iters") + 1])})
        outcomes = run_pretrain(arguments + saves, RANKS, probe=parameters_and_sources, timeout=study.timeout)
        documents = loss_of_documents(study, run, folder)
    log = outcomes[-1].stdout  # Megatron prints on the last rank
    parameters, sources = zip(*(outcome.record.probe for outcome in outcomes), strict=True)
    measured = Measured(
        arguments=arguments,
        corpus=digest_of(study.corpus),
        sources=sources[0],
        code=digest_of_code(sources[0]),
        # Of the largest part on one rank, where home splits the model.
        parameters=max(parameters),
        seconds=time.monotonic() - begin,
        training=[outcomes[-1].losses],
        validation={int(at): float(loss) for at, loss in VALIDATION.findall(log)},
        rounds=[{"tokens": int(tokens)} for tokens in _TOKENS.findall(log)],
        documents=documents,
    )
    keep(study, run, measured)
    return measured


def loss_of_documents(study: HotSwitchStudy, run: Run, checkpoint: str) -> float:
    """Return the mean loss of held-out documents under a checkpoint's weights."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    words = study.document_arguments(run, len(IndexedDataset(str(study.held_out))), checkpoint)
    ((_, loss),) = VALIDATION.findall(run_pretrain(words, RANKS, timeout=study.timeout)[-1].stdout)
    return float(loss)


def report_on(study: HotSwitchStudy, wanted: Sequence[Run], seeds: Sequence[int], json_file: Path | None) -> None:
    """Print the tables, from the runs that are finished."""
    results = finished_runs(study, wanted)
    print()
    compare(study, results, seeds)
    cases = []
    for reference in (STOCK, PADDED):
        both = [[results.get(Run(method=method, seed=seed)) for method in (HOT, reference)] for seed in seeds]
        pairs = [(hot, other) for hot, other in both if hot and other]
        cases += [
            Case(
                case=f"hot_over_{reference.name}_{what}",
                value=statistics.median(getattr(hot, of) / getattr(other, of) for hot, other in pairs),
                unit="ratio",
                goal=HOT.goal,
                direction="lower",
            )
            for what, of in (("loss", "final"), ("documents_loss", "documents"))
            if pairs
        ]
    rows = []
    for run, measured in results.items():
        tokens = [entry["tokens"] for entry in measured.rounds] or [_TOKENS_OF[run.method]]
        curve = [f"{measured.validation[at]:.3f}" for at in sorted(measured.validation)]
        predicted = statistics.mean(tokens) * max(measured.validation)
        rows.append((run.method.title, str(run.seed), f"{predicted:,.0f}", *curve, f"{measured.documents:.3f}"))
    steps = {tuple(sorted(measured.validation)[:-1]) for measured in results.values()}
    points = [" / ".join(map(str, sorted(set(at)))) for at in zip(*steps, strict=True)]
    print()
    print_table(("method", "seed", "tokens", *(f"after {at}" for at in points), "at the end", "documents"), rows)
    print()
    report(cases, json_file)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the study's options."""
    found = benchmark_parser("hot_switch_convergence", __doc__)
    add_seeds_option(found, "all methods")
    found.add_argument(
        "--output",
        type=folder_for_output,
        default=REPOSITORY / "outputs" / "hot_switch_convergence",
        help="folder for corpus and runs (outputs/hot_switch_convergence)",
    )
    add_report_option(found)
    return found


if __name__ == "__main__":
    # By its module's name: the ranks look functions up where they were defined.
    from benchmarks.hot_switch_convergence import main as run_study

    sys.exit(run_study())
