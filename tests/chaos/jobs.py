# SPDX-License-Identifier: Apache-2.0
"""A run of a real server and real Megatron jobs at toy size, under the same faults as the synthetic one."""

from __future__ import annotations

import hashlib
import os
import signal
import statistics
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.chaos.history import History
from tests.chaos.job_rank import prepare
from tests.chaos.schedule import Fault
from tests.chaos.settings import BATCH, RUN, STEPS, Settings
from tests.chaos.synthetic import Synthetic
from tests.support.distributed import RankFailure
from tests.support.pretrain import RankOutcome, run_pretrain
from tests.support.waiting import PATIENCE, until
from tests.sync_service.jobs import Kind, job_arguments, model_of, values_held
from tests.sync_service.service import Service, Zygote

__all__ = ["run_jobs"]

KINDS: tuple[Kind, ...] = (("single", "fp32", 1), ("tp2", "fp32", 2))
"""Of the jobs, in turn."""
_LAST_ROUNDS = 3
"""Whose losses are compared."""
_TIMEOUT = 3600.0


def run_jobs(settings: Settings, faults: Sequence[Fault], *, seconds: float, folder: Path, zygote: Zygote) -> History:
    """Make a run as `run_synthetic` does, and one without faults of as many rounds to compare losses and time with."""
    history = _made(settings, faults, seconds, folder, zygote, stop=None)
    if not history.stuck:
        (folder / "faultless").mkdir()
        calm = _made(settings, (), 0.0, folder / "faultless", zygote, stop=history.stop)
        history.faultless, history.faultless_loss = calm, _loss(calm)
    history.loss = _loss(history)
    return history


def _made(
    settings: Settings, faults: Sequence[Fault], seconds: float, folder: Path, zygote: Zygote, *, stop: int | None
) -> History:
    run = _Jobs(settings, folder, zygote)
    if stop is not None:
        (folder / "stop").write_text(str(stop))
    try:
        run.make(faults, seconds, stop=stop)
    finally:
        run.close()
    return run.history


def _loss(history: History) -> float:
    """Return the mean of what peers have reported for the last rounds."""
    newest = max(history.commits(), default=0)
    found = [event["loss"] for event in history.events("uploaded") if event["round"] > newest - _LAST_ROUNDS]
    return statistics.fmean(found) if found else float("nan")


class _Jobs(Synthetic):
    """The run, as actions see it; its peers are jobs of one or two ranks."""

    def _started(self, who: str) -> _Job:
        index = self._names.index(who)
        service = Service(
            self._zygote, self.folder, {RUN: self._settings.run_config()}, address=self.relays[who].address
        )
        return _Job(service, who, KINDS[index % len(KINDS)], self._settings.step_seconds)

    def _conclude(self) -> None:
        self.tail.look()
        self.history.journal = self.tail.events
        self.history.read_peers(self.folder)
        for name, job in self.processes.items():
            if isinstance(job, _Job) and job.exit_code == 0:
                self.history.said(name, "ends")[-1]["model"] = job.model


class _Job:
    """A job, with what `Process` has."""

    def __init__(self, service: Service, name: str, kind: Kind, step_seconds: float) -> None:
        self._pids = service.folder / f"{name}.pids"
        self._pids.unlink(missing_ok=True)
        self._ranks = kind[2]
        self._was_killed = False
        folder = service.folder / f"{name}.checkpoints"
        arguments = job_arguments(
            service,
            name,
            kind,
            train_iters=100_000,  # more than it makes in any run; as many as these have learning rates
            lr_decay_iters=1000,
            global_batch_size=BATCH,
            lr=1e-3,
            sync_service_interval=STEPS,
            sync_service_round_seconds=240,
            save=str(folder),
            load=str(folder),
            save_interval=STEPS - 1,
        )
        pool = ThreadPoolExecutor(1)
        self._future: Future[list[RankOutcome]] = pool.submit(
            run_pretrain,
            arguments,
            self._ranks,
            before=partial(prepare, str(service.folder), name, STEPS * BATCH, step_seconds),
            probe=values_held,
            timeout=_TIMEOUT,
        )
        pool.shutdown(wait=False)

    @property
    def exit_code(self) -> int | None:
        """How it has ended; None while it runs."""
        if not self._future.done():
            return None
        if self._future.exception() is None:
            return 0
        return -signal.SIGKILL if self._was_killed else 1

    @property
    def model(self) -> str:
        """Identifies the values with which it has ended."""
        total = hashlib.sha256()
        for name, values in sorted(model_of(self._future.result()).items()):
            total.update(name.encode() + values.tobytes())
        return total.hexdigest()

    @property
    def output(self) -> str:
        """Why it has failed."""
        return str(self._future.exception() or "") if self._future.done() else ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to all ranks, unless it has ended."""
        until(lambda: self._future.done() or len(self._running()) == self._ranks, "the ranks of a job")
        self._was_killed |= number == signal.SIGKILL
        for pid in self._running():
            if not self._future.done():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Return how it has ended."""
        with suppress(RankFailure):
            self._future.result(seconds)
        assert self.exit_code is not None
        return self.exit_code

    def _running(self) -> list[int]:
        return [int(line) for line in self._pids.read_text().split()] if self._pids.exists() else []
