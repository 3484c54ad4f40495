# SPDX-License-Identifier: Apache-2.0
"""Making the study's runs, and the loss of held-out documents under what each has trained."""

from __future__ import annotations

import re
import tempfile
import time

from benchmarks.convergence.code import digest_of_code
from benchmarks.convergence.runs import VALIDATION, Measured, digest_of, keep, parameters_and_sources
from benchmarks.convergence.settings import Run
from benchmarks.hot_switch_convergence.settings import RANKS, HotSwitchStudy
from tests.support.presets import command_line
from tests.support.pretrain import run_pretrain

__all__ = ["loss_of_documents", "make"]

_TOKENS = re.compile(r"iteration +\d+/.*tokens: (\d+)")


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
