# SPDX-License-Identifier: Apache-2.0
"""The report of a peer about its interval, with which it commits a contribution."""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, dataclass
from typing import Any

from megatron_ext.sync_service.protocol.field_checks import LARGEST_COUNT
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.refusal import Refusal

__all__ = ["CODEC_PACKAGE", "INTERVAL", "LONGEST_DATA", "Progress", "Report", "progress_message"]

CODEC_PACKAGE = "codec_package"
"""Field of what peers have in common: the other package, with its version, that has the codec; absent for ours."""

INTERVAL = "--sync-service-interval"
"""The field by which a peer says how many steps it makes between two rounds, or for how long it makes them."""

LONGEST_DATA = 256
"""Characters in which a peer says which data it trains on, which are kept with the run."""


@dataclass(frozen=True)
class Progress:
    """How far a job's training is, in its own counts."""

    iteration: int
    """Iterations made."""

    samples: int
    """Consumed of its part."""

    schedule: float
    """What the schedules of learning rate and weight decay count; not always whole."""

    batch: int = 0
    """Samples of an iteration; 0 where that was not said."""

    def after(self, steps: int) -> Progress:
        """Return how far it is after further iterations of the same batch."""
        samples = steps * self.batch
        return Progress(self.iteration + steps, self.samples + samples, self.schedule + samples, self.batch)

    @classmethod
    def of(cls, message: Any) -> Progress:
        """Return what the protocol's message says.

        Raises:
            Refusal: no peer can resume from there.
        """
        found = cls(message.iteration, message.samples, message.schedule, message.batch)
        for name, count in asdict(found).items():
            _check_count(f"progress.{name}", count)
        return found


@dataclass(frozen=True, kw_only=True)
class Report:
    """Beside the values; nothing of it changes them."""

    loss: float | None = None
    """Mean training loss of the interval."""

    steps: int | None = None
    """Steps made since the values that the interval began with."""

    progress: Progress | None = None
    """How far the training was then; None where it cannot be resumed from there."""

    @classmethod
    def of(cls, request: Any) -> Report:
        """Return what the protocol's CommitRequest says.

        Raises:
            Refusal: it cannot be.
        """
        if request.HasField("steps"):
            _check_count("steps", request.steps)
        return cls(
            loss=request.loss if request.HasField("loss") else None,
            steps=request.steps if request.HasField("steps") else None,
            progress=Progress.of(request.progress) if request.HasField("progress") else None,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the known fields, for the journal; a non-finite loss as None, which JSON can hold."""
        found: dict[str, Any] = {}
        if self.loss is not None:
            found["loss"] = self.loss if math.isfinite(self.loss) else None
        if self.steps is not None:
            found["steps"] = self.steps
        if self.progress is not None:
            found["progress"] = list(astuple(self.progress))
        return found


def progress_message(progress: Progress | None) -> Any:
    """Return the protocol's message that says it, None for none."""
    return None if progress is None else pb2.Progress(**asdict(progress))


def _check_count(field: str, count: float) -> None:
    """Check that a job can have counted so far.

    Raises:
        Refusal: it cannot.
    """
    if not 0 <= count <= LARGEST_COUNT:  # nor is NaN
        raise Refusal("invalid", f"{field} is {count}; it must be a number of 0 to {LARGEST_COUNT}")
