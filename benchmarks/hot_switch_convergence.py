# SPDX-License-Identifier: Apache-2.0
"""Validation losses of hot switching and of Megatron's own packed training after as many tokens of one corpus.

    python -m benchmarks.hot_switch_convergence [--json FILE]

Trains a GPT of 1.0 M parameters on the functions and classes of Python's standard library, four processes each. Both
sides keep documents apart in attention and positions; which documents meet in a step, and how long ones are cut,
differs. Both are validated by both: on packed rows, which begin anywhere in a document, and on documents that begin at
their beginning. A run that is finished is not made again. docs/hot-switch.md tells what came out.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from benchmarks.common import Case, add_report_option, print_table, report
from benchmarks.convergence.results import compare
from benchmarks.convergence.runs import (
    VALIDATION,
    Measured,
    count_parameters,
    digest_of,
    finished_runs,
    keep,
    make_missing_of,
)
from benchmarks.convergence.settings import MODEL, TRAINING, Method, Run, Study
from tests.support.distributed import REPOSITORY
from tests.support.presets import Options, command_line, toy_gpt
from tests.support.pretrain import run_pretrain

RANKS = 4
CONTEXT = 512

# Stock packing: rows of CONTEXT tokens, cut out of one stream of documents.
STOCK = Method(
    name="stock",
    title="Megatron, packed",
    options={"micro_batch_size": 4, "global_batch_size": 16, "eval_iters": 9},
)
HOT = Method(
    name="hot",
    title="hot switching",
    options={
        "micro_batch_size": 1,
        "global_batch_size": 25,  # documents, or pieces of CONTEXT tokens of longer ones
        "eval_global_batch_size": 24,
        "eval_iters": 6,  # on 144 rows, as the other side
        "calculate_per_token_loss": True,
        "hot_switch_strategies": ["1,2,2", "4,1,1", "2,2,1"],
        "hot_switch_bucket_sizes": [CONTEXT, 256, 128, 0],
    },
    goal=1.02,
)

HELD_OUT = 0.05
"""Part of the documents, the last ones, that Megatron splits off for validation."""

_STOCK_TOKENS = 8177
"""Predicted in a packed step: what follows the end of a document, 550 tokens long on average, does not count."""

_HOT_STEPS = 0.99
"""Of hot switching for a packed one: a piece has 330 tokens to predict on average."""

_TOKENS = re.compile(r"iteration +\d+/.*tokens: (\d+)")


@dataclass(frozen=True, kw_only=True)
class HotSwitchStudy(Study):
    """Where everything is, and how long a run is."""

    iterations: int = 200
    evaluation: int = 50
    """Steps of hot switching between evaluations."""

    methods: tuple[Method, ...] = (STOCK, HOT)

    @property
    def corpus(self) -> Path:
        """Prefix of the tokenized corpus."""
        return self.output / "corpus" / "functions"

    @property
    def held_out(self) -> Path:
        """Prefix of the documents of it that nobody trains on, cut and padded to rows of their own."""
        return self.output / "corpus" / "held_out"

    def arguments(self, run: Run) -> list[str]:
        """Return the command line of examples/pretrain_gpt.py."""
        is_stock = run.method is STOCK
        # Megatron takes other rows for every evaluation, and shuffles them by how many there are in all: both sides
        # have the same only where their evaluations are as many.
        when: Options = {
            "seed": run.seed,
            "train_iters": self.iterations if is_stock else round(_HOT_STEPS * self.iterations),
            "eval_interval": round(self.evaluation / _HOT_STEPS) if is_stock else self.evaluation,
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
        return toy_gpt(MODEL, TRAINING, when, self.data, rows, run.method.options, self.overrides)

    def document_arguments(self, run: Run, rows: int, checkpoint: str) -> list[str]:
        """Return the command line that takes the loss of held-out documents: stock Megatron's, for both sides.

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
    if not study.corpus.with_suffix(".idx").exists():
        study.output.mkdir(parents=True, exist_ok=True)
        quickstart().prepare(study.output)
    if not study.held_out.with_suffix(".idx").exists():
        hold_out(study)


def hold_out(study: HotSwitchStudy) -> None:
    """Write the documents that Megatron splits off for validation into files of their own.

    They are cut into pieces like those of hot switching, and each is filled up to the length of a row with ends of
    documents, for which no loss is taken: so rows begin where pieces do.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    corpus = IndexedDataset(str(study.corpus))
    builder = IndexedDatasetBuilder(f"{study.held_out}.bin", dtype=corpus.index.dtype)
    for number in range(round((1 - HELD_OUT) * len(corpus)), len(corpus)):
        tokens = torch.tensor(corpus[number].astype("int64"))
        for piece in tokens.split(CONTEXT - 1):
            row = torch.full((CONTEXT,), int(tokens[-1]))
            row[: len(piece)] = piece
            builder.add_document(row, [CONTEXT])
    builder.finalize(f"{study.held_out}.idx")


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
        outcomes = run_pretrain(arguments + saves, RANKS, probe=count_parameters, timeout=study.timeout)
        documents = loss_of_documents(study, run, folder)
    log = outcomes[-1].stdout  # Megatron prints on the last rank
    measured = Measured(
        arguments=arguments,
        corpus=digest_of(study.corpus),
        # Of the largest part on one rank, where home splits the model.
        parameters=max(outcome.record.probe for outcome in outcomes),
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
    cases = compare(study, results, seeds)
    both = [[results.get(Run(method=method, seed=seed)) for method in (STOCK, HOT)] for seed in seeds]
    ratios = [hot.documents / stock.documents for stock, hot in both if stock and hot]
    if ratios:
        value = statistics.median(ratios)
        cases.append(
            Case(case="hot_documents_loss_ratio", value=value, unit="ratio", goal=HOT.goal, direction="lower")
        )
    rows = []
    for run, measured in results.items():
        tokens = [entry["tokens"] for entry in measured.rounds] or [_STOCK_TOKENS]
        curve = [f"{measured.validation[at]:.3f}" for at in sorted(measured.validation)]
        predicted = statistics.mean(tokens) * max(measured.validation)
        rows.append((run.method.title, str(run.seed), f"{predicted:,.0f}", *curve, f"{measured.documents:.3f}"))
    steps = {run.method: sorted(measured.validation)[:-1] for run, measured in results.items()}
    points = [" / ".join(map(str, at)) for at in zip(*steps.values(), strict=True)]
    print()
    print_table(("method", "seed", "tokens", *(f"after {at}" for at in points), "at the end", "documents"), rows)
    print()
    report(cases, json_file)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the study's options."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.hot_switch_convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of both sides (1 2 3)")
    found.add_argument(
        "--output",
        type=Path,
        default=REPOSITORY / "outputs" / "hot_switch_convergence",
        help="folder for corpus and runs (outputs/hot_switch_convergence)",
    )
    add_report_option(found)
    return found


if __name__ == "__main__":
    # By its module's name: the ranks look functions up where they were defined.
    from benchmarks.hot_switch_convergence import main as run_study

    sys.exit(run_study())
