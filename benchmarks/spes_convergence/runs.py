# SPDX-License-Identifier: Apache-2.0
"""Making the study's runs: a centralized job, or a server and its peers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from benchmarks.convergence.code import digest_of_code, server_sources
from benchmarks.convergence.runs import VALIDATION, Measured, digest_of, keep, parameters_and_sources
from benchmarks.convergence.settings import Run
from benchmarks.server_process import server_of
from benchmarks.spes_convergence.settings import RANKS, SpesStudy
from tests.support.pretrain import RankOutcome, run_pretrain

__all__ = ["make"]


def make(study: SpesStudy, run: Run) -> Measured:
    """Train, and write down what was measured once all is known.

    Raises:
        RuntimeError: after a round peers had different validation losses.
    """
    begin = time.monotonic()
    jobs = train(study, run)
    found = [validation(job[-1]) for job in jobs]
    if any(losses != found[0] for losses in found):
        raise RuntimeError(f"{run.name}: the peers' validation losses differ: {found}")
    parameters, loaded = jobs[0][0].record.probe
    sources = loaded if study.server(run.method) is None else sorted({*loaded, *server_sources()})
    measured = Measured(
        arguments=study.arguments(run),
        corpus=digest_of(study.corpus),
        sources=sources,
        code=digest_of_code(sources),
        parameters=parameters,
        seconds=time.monotonic() - begin,
        training=[job[0].losses for job in jobs],
        validation=found[0],
        rounds=[],
    )
    keep(study, run, measured)
    return measured


def train(study: SpesStudy, run: Run) -> list[list[RankOutcome]]:
    """Return the ranks of every job of a run."""
    settings = study.server(run.method)
    if settings is None:
        return [run_pretrain(study.command(run), RANKS, probe=parameters_and_sources, timeout=study.timeout)]
    with (
        tempfile.TemporaryDirectory() as folder,
        _started(study, run) as start,
        server_of(Path(folder), {"spes": settings}) as server,
        ThreadPoolExecutor(study.peers) as pool,
    ):
        jobs = [
            pool.submit(
                run_pretrain,
                study.command(run, peer, server.address, start),
                1,
                probe=parameters_and_sources,
                timeout=study.timeout,
            )
            for peer in range(study.peers)
        ]
        return [job.result() for job in jobs]


@contextmanager
def _started(study: SpesStudy, run: Run) -> Iterator[str]:
    """Give the folder of a centralized start's checkpoint, where the run has one."""
    with tempfile.TemporaryDirectory() as folder:
        if study.is_started(run.method):
            run_pretrain(study.start_command(run, folder), RANKS, timeout=study.timeout)
        yield folder


def validation(rank: RankOutcome) -> dict[int, float]:
    """Return validation losses by iterations finished."""
    return {int(at): float(loss) for at, loss in VALIDATION.findall(rank.stdout)}
