# SPDX-License-Identifier: Apache-2.0
"""Making the study's runs, and remembering what they measured."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.convergence.code import code_at_start, digest_of_code, loaded_sources
from benchmarks.convergence.settings import VOCABULARY, Noise, Run, Study
from megatron_ext.local_sgd.reporting.round_log import read_rounds
from tests.support.pretrain import run_pretrain

__all__ = [
    "VALIDATION",
    "Measured",
    "digest_of",
    "finished",
    "finished_runs",
    "keep",
    "make",
    "make_missing_of",
    "parameters_and_sources",
]

VALIDATION = re.compile(r"validation loss at iteration (\d+).*lm loss value: ([\d.E+-]+)")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of a finished run."""

    arguments: list[str]
    """The command line of examples/pretrain_gpt.py; a run that would have another one is made again."""

    corpus: str = ""
    """Of the corpus, see `digest_of`; likewise."""

    noise: list[int] = field(default_factory=list)
    """`Noise.what` of a noisy run; likewise."""

    sources: list[str] = field(default_factory=list)
    """Files that the run depends on, from the repository's root."""

    code: str = ""
    """Of those files, see `digest_of_code`; likewise."""

    parameters: int
    """Of the model."""

    seconds: float
    """Wall time, with the start and the evaluations."""

    training: list[list[float]]
    """Every worker's loss of every iteration; in a synchronous run the same for all."""

    validation: dict[int, float]
    """Validation loss by iterations finished, with local SGD that of the weights of the last round."""

    rounds: list[dict[str, Any]]
    """The lines of the round log."""

    documents: float | None = None
    """Loss at the end on held-out documents of their own length, in studies that ask for it."""

    @property
    def final(self) -> float:
        """The validation loss at the end."""
        return self.validation[max(self.validation)]


def finished(study: Study, run: Run) -> Measured | None:
    """Return what a run measured; None if it was not made with these settings, this corpus and this code."""
    measured = _made_with_these_settings(study, run)
    return None if measured is None or _is_of_other_code(measured) else measured


def _is_of_other_code(measured: Measured) -> bool:
    return measured.code != digest_of_code(measured.sources)


def _made_with_these_settings(study: Study, run: Run) -> Measured | None:
    file = study.result(run)
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    content["validation"] = {int(at): loss for at, loss in content["validation"].items()}
    measured = Measured(**content)
    wanted = study.arguments(run), digest_of(study.corpus), _noise(study, run)
    return measured if (measured.arguments, measured.corpus, measured.noise) == wanted else None


def digest_of(corpus: Path) -> str:
    """Return the SHA-256 of a tokenized corpus, which is remade where Python's sources have changed; "" for none."""
    if not corpus.with_suffix(".bin").exists():
        return ""
    with corpus.with_suffix(".bin").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def finished_runs(study: Study, runs: Sequence[Run]) -> dict[Run, Measured]:
    """Return what those of some runs measured that are `finished`."""
    found = {run: finished(study, run) for run in runs}
    return {run: measured for run, measured in found.items() if measured is not None}


def make_missing_of(study: Study, wanted: Sequence[Run], make: Callable[[Any, Run], Measured]) -> None:
    """Make the runs that are not finished, in order, and say how they went."""
    code_at_start()
    missing = [run for run in wanted if finished(study, run) is None]
    print(f"{len(wanted)} runs of {study.iterations} iterations, {len(missing)} of them still to make", flush=True)
    old = [run.name for run in missing if _made_with_these_settings(study, run) is not None]
    if old:
        print(f"made again, because the code that they ran has changed since: {', '.join(old)}", flush=True)
    for run in missing:
        measured = make(study, run)
        print(f"{run.name}: validation loss {measured.final:.4f} after {measured.seconds:.0f} s", flush=True)


def make(study: Study, run: Run) -> Measured:
    """Train, and write down what was measured once all is known."""
    arguments = study.arguments(run)
    study.result(run).parent.mkdir(parents=True, exist_ok=True)
    study.round_log(run).unlink(missing_ok=True)
    begin = time.monotonic()
    outcomes = run_pretrain(
        arguments,
        study.processes,
        probe=parameters_and_sources,
        before=[partial(feed_noise, study.noise)] if run.noisy else [],
        timeout=study.timeout,
    )
    parameters, sources = outcomes[0].record.probe
    measured = Measured(
        arguments=arguments,
        corpus=digest_of(study.corpus),
        noise=_noise(study, run),
        sources=sources,
        code=digest_of_code(sources),
        parameters=parameters,
        seconds=time.monotonic() - begin,
        training=[outcome.losses for outcome in outcomes],
        # Megatron prints it on the last rank.
        validation={int(at): float(loss) for at, loss in VALIDATION.findall(outcomes[-1].stdout)},
        rounds=read_rounds(study.round_log(run)) if study.round_log(run).is_file() else [],
    )
    keep(study, run, measured)
    return measured


def keep(study: Study, run: Run, measured: Measured) -> None:
    """Write down what a finished run measured."""
    study.result(run).parent.mkdir(parents=True, exist_ok=True)
    partial_file = study.result(run).with_suffix(".partial")
    partial_file.write_text(json.dumps(asdict(measured)), encoding="utf-8")
    partial_file.replace(study.result(run))


def parameters_and_sources(model: Any, _optimizer: Any, _args: Any) -> tuple[int, list[str]]:
    """Return the number of parameters that this rank has of a model, and the files that it has trained with."""
    return sum(value.numel() for chunk in model for value in chunk.parameters()), loaded_sources()


def feed_noise(noise: Noise) -> None:
    """Let the training samples of one worker be random tokens for a while; called on every rank."""
    if int(os.environ["RANK"]) != noise.worker:
        return
    from megatron.core.datasets.gpt_dataset import GPTDataset

    GPTDataset.__getitem__ = _drawing(GPTDataset.__getitem__, noise)


def _drawing(read: Callable[..., Any], noise: Noise) -> Callable[..., Any]:
    import torch
    from megatron.core.datasets.utils import Split
    from megatron.training import get_args

    generator = torch.Generator().manual_seed(0)

    @functools.wraps(read)
    def read_or_draw(dataset: Any, index: int | None) -> Any:
        sample = read(dataset, index)
        if dataset.index_split is not Split.train or not noise.first <= get_args().curr_iteration < noise.end:
            return sample
        tokens = torch.randint(VOCABULARY, (len(sample["tokens"]) + 1,), generator=generator)
        return {**sample, "tokens": tokens[:-1], "labels": tokens[1:]}

    return read_or_draw


def _noise(study: Study, run: Run) -> list[int]:
    return study.noise.what if run.noisy else []
