# SPDX-License-Identifier: Apache-2.0
"""A simulated job from its first step to its last, with checkpoints and failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_ext.simulate.event_limits import FailureGuard
from megatron_ext.simulate.fleet import SimulatedFleet
from megatron_ext.simulate.time_ledger import Cause, TimeLedger

__all__ = ["SimulatedJob", "SimulatedRun", "run_job"]


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """What became of a run."""

    seconds: float
    """From its begin to its end."""

    worker_steps: int
    """Inner steps of all workers together that count."""

    rounds: int
    """Outer rounds of the whole model, or of all of its fragments, that count."""

    failures: int
    """After which the job restarted."""

    worker_bytes: float
    """That a worker sent to others, also what was lost."""

    time: Mapping[Cause, float]
    """Seconds by cause, in the mean over the workers; together all of `seconds`."""

    tokens: float = 0.0
    """Of all workers' steps that count; 0 where a step's are not known."""

    too_late: float | None = None
    """Part of the contributions that came too late to count; None where nothing is contributed."""

    @property
    def utilisation(self) -> float:
        """Part of the time in which a worker makes steps that count, in the mean over the workers."""
        return self.time["training"] / self.seconds

    def figures(self) -> dict[str, str]:
        """Return the figures for people, by name."""
        tokens = {"tokens/s": f"{self.tokens / self.seconds:,.0f}"} if self.tokens else {}
        too_late = {} if self.too_late is None else {"too late, %": f"{100 * self.too_late:.2f}"}
        return {
            "utilisation": f"{self.utilisation:.3f}",
            "hours": f"{self.seconds / 3600:.4g}",
            "worker steps/s": f"{self.worker_steps / self.seconds:.4g}",
            **tokens,
            "GB sent by a worker": f"{self.worker_bytes / 1e9:.4g}",
            "outer rounds": str(self.rounds or "-"),
            **too_late,
            "failures": str(self.failures),
        }

    def as_json(self) -> dict[str, Any]:
        """Return the figures under their names."""
        too_late = {} if self.too_late is None else {"too_late": self.too_late}
        return {
            "utilisation": self.utilisation,
            "seconds": self.seconds,
            "worker_steps": self.worker_steps,
            "rounds": self.rounds,
            **too_late,
            "failures": self.failures,
            "worker_bytes": self.worker_bytes,
            "tokens_per_second": self.tokens / self.seconds if self.tokens else None,
            "seconds_by_cause": dict(self.time),
        }


class SimulatedJob(Protocol):
    """A way to train."""

    ledger: TimeLedger
    """The workers' clocks; another object after a failure."""

    iteration: int
    """What checkpoints are counted in."""

    worker_bytes: float
    """Sent so far."""

    @property
    def worker_steps(self) -> int:
        """Of all workers together."""

    @property
    def rounds(self) -> int:
        """Made so far."""

    @property
    def finished(self) -> bool:
        """Whether the run is over."""

    def advance(self, until: int | None) -> None:
        """Train up to the next event, or up to an iteration if that comes first."""

    def land(self) -> None:
        """Wait for what is in flight, as a checkpoint does."""

    def state(self) -> Any:
        """Return what a checkpoint holds."""

    def restore(self, state: Any) -> None:
        """Continue from what a checkpoint holds."""


def run_job(job: SimulatedJob, fleet: SimulatedFleet, step_tokens: int = 0) -> SimulatedRun:
    """Let a job train to its end.

    Args:
        job: at its begin.
        fleet: checkpoints, failures and seed.
        step_tokens: of a worker's step.

    Raises:
        UserError: failures come faster than checkpoints.
    """
    random = np.random.default_rng([fleet.seed, 1])
    mean = 3600 * fleet.mtbf_hours / (fleet.workers * fleet.worker_gpus)
    every = fleet.save_interval or None
    due = every
    fails = random.exponential(mean) if mean else np.inf
    saved = job.ledger.copy(), job.state(), due
    failures = saves_made = 0
    guard = FailureGuard(to_next="checkpoint", fails=f"a GPU fails every {mean:.3g} s", shorter="--save-interval")
    while not job.finished:
        begun, sent = job.ledger.now, job.worker_bytes
        job.advance(due)
        saves = due is not None and job.iteration >= due
        if saves:
            job.land()
            job.ledger.spend("saving", fleet.save_seconds)
        if fails <= job.ledger.now:
            failures += 1
            guard.check(saves_made, failures)
            # What would have been sent after the failure was not.
            job.worker_bytes = sent + (job.worker_bytes - sent) * (fails - begun) / (job.ledger.now - begun)
            job.ledger.fail(saved[0], fails, fleet.restart_seconds)
            job.restore(saved[1])
            due = saved[2]
            fails = job.ledger.now + random.exponential(mean)
        elif saves and due is not None and every is not None:
            due += every
            saved, saves_made = (job.ledger.copy(), job.state(), due), saves_made + 1
    job.ledger.meet()
    return SimulatedRun(
        seconds=job.ledger.now,
        worker_steps=job.worker_steps,
        rounds=job.rounds,
        failures=failures,
        worker_bytes=job.worker_bytes,
        time=job.ledger.means(),
        tokens=float(step_tokens) * job.worker_steps,
    )
