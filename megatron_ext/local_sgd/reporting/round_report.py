# SPDX-License-Identifier: Apache-2.0
"""What an outer round tells about itself."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_ext.phrases import listed

__all__ = ["RoundClock", "RoundReport", "WorkerProgress", "new_level"]


@dataclass
class RoundClock:
    """Where the time that a round keeps this rank from training goes."""

    seconds: float = 0.0
    """Seconds of the whole round, without those in which training continued."""

    waiting: float = 0.0
    """Seconds of them until the last of the workers that this rank meets had arrived."""

    applying: float = 0.0
    """Seconds of them of arithmetic: norms, reduction, outer step. With a GPU, of launching it."""

    @contextlib.contextmanager
    def measure(self, part: Literal["seconds", "waiting", "applying"]) -> Iterator[None]:
        """Add the time of the body to `part`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - start)


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """What one outer round did on this rank."""

    round: int
    """Number of the round, from 1."""

    fragment: int
    """Which fragment of the model it moved, from 0; 0 where the model is not cut."""

    pseudo_gradient_norm: float
    """L2 norm of the mean pseudo-gradient over the whole fragment."""

    unit_norms: dict[str, float]
    """The same over each unit, in model order."""

    worker_norms: list[float]
    """L2 norm of each worker's own pseudo-gradient over the whole fragment."""

    worker_steps: list[int] | None
    """Steps that each worker has made since the last round, where they differ. One that has made none did not count."""

    rejected: dict[str, list[int]]
    """The workers that were left out, for every unit in which any was."""

    reasons: dict[str, list[str]]
    """Why, for each of them."""

    new_levels: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    """By unit, the workers whose norms the detector judges by a new level from the next round on: the mean that it had
    rejected them by, and the new one."""

    lasting: list[str] = field(default_factory=list)
    """What the user should do about workers that have been left out in many rounds running, one sentence each."""

    weights: dict[str, list[float]]
    """The weight of every worker in every unit; 0 for those that were left out. Empty for a plain mean."""

    clipped: dict[str, float]
    """By what the common pseudo-gradient was multiplied, for every unit that was clipped."""

    cosine: float | None
    """Cosine of the angle between the pseudo-gradient and the outer optimizer's momentum before the step, which holds
    the previous ones; None where there is no momentum yet, or it was not asked for."""

    outer_options: dict[str, float] = field(default_factory=dict)
    """Learning rate and momentum of the outer step, where a schedule has them change."""

    bytes_sent: int
    """Bytes that this rank sent to other workers."""

    seconds: float
    """Wall time that the round kept this rank from training; in the background, up to its outer step."""

    waiting_seconds: float
    """What of it passed until all workers had come."""

    applying_seconds: float
    """What of it was arithmetic; the rest was exchange."""

    @property
    def sending_seconds(self) -> float:
        """What of it was exchange."""
        return max(self.seconds - self.waiting_seconds - self.applying_seconds, 0.0)

    @property
    def skipped_units(self) -> list[str]:
        """The units that went back to their anchor, because all workers were left out."""
        return [unit for unit, workers in self.rejected.items() if len(workers) == self._counted]

    @property
    def non_finite(self) -> list[int]:
        """The workers with non-finite values."""
        return [worker for worker, norm in enumerate(self.worker_norms) if not math.isfinite(norm)]

    @property
    def _counted(self) -> int:
        """How many workers have made steps."""
        return len(self.worker_norms) if self.worker_steps is None else sum(map(bool, self.worker_steps))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON line, and what follows from them."""
        return {
            **dataclasses.asdict(self),
            "skipped_units": self.skipped_units,
            "sending_seconds": self.sending_seconds,
        }

    def remarks(self, debug: bool = False) -> list[str]:
        """Return what the user should know of the workers that were left out, one sentence each.

        Args:
            debug: say all workers' norms then, and what was clipped.
        """
        everyone = self._counted
        units_without: dict[tuple[int, ...], list[str]] = {}
        for unit, workers in self.rejected.items():
            units_without.setdefault(tuple(workers), []).append(unit)
        found = []
        for left_out, units in units_without.items():
            why = "; ".join(
                f"worker {worker}, {units[0]}: {reason}"
                for worker, reason in zip(left_out, self.reasons.get(units[0], []), strict=False)
            )
            why = f" ({why})" if why else ""
            if len(left_out) == everyone:
                found.append(f"all workers were anomalous in {listed(units)}, which went back to the anchor{why}")
            else:
                found.append(f"left out {_workers(left_out)}, anomalous in {listed(units)}{why}")
        if self.new_levels:
            levels = [
                f"{unit} ({new_level(by_worker.values())}, {_workers(sorted(by_worker))})"
                for unit, by_worker in self.new_levels.items()
            ]
            found.append(f"learned a new level of norms, which most workers share, in {listed(levels)}")
        found += self.lasting
        if debug and found:
            found.append(f"the workers' norms were {', '.join(f'{norm:.4g}' for norm in self.worker_norms)}")
        if debug:
            found += [f"clipped {unit} to {coefficient:.3g} of its norm" for unit, coefficient in self.clipped.items()]
        return [f"outer round {self.round}: {text}" for text in found]


@dataclass(frozen=True, kw_only=True)
class WorkerProgress:
    """What a step's rounds did."""

    reports: list[RoundReport]
    """Of the rounds whose outer step was made."""

    changed: bool
    """Whether the values were changed."""

    healed: bool
    """Whether this worker's values were non-finite and have been replaced by the common ones."""


def _workers(numbers: Sequence[int]) -> str:
    return f"worker{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def new_level(levels: Collection[tuple[float, float]]) -> str:
    """Return the means, over some workers, of their levels before and now."""
    before, now = (math.fsum(values) / len(levels) for values in zip(*levels, strict=True))
    return f"{before:.4g} -> {now:.4g}"
