# SPDX-License-Identifier: Apache-2.0
"""What a round of local SGD costs in bytes and time, and what of a run's time that leaves for training.

A worker sends its message for every other worker's share of the values and gets theirs, then the same with the results:
as many bytes as a ring's all-reduce. So a round of n values among W workers moves, from each of them,

    bytes(round) = (W - 1) / W * (out(n) + home(n)),        seconds(round) = 8 bytes / bandwidth + 2 (W - 1) latency,

out and home being the codec's bytes of n values. Training continues for a delay of tau steps, so that

    waiting = max(0, seconds(round) - tau * step),          utilisation = H step / (H step + waiting).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.errors import combine
from megatron_ext.outer.codecs.all_codecs import build_codec

__all__ = ["MeetingCost", "WorkerLink", "compare", "plainest", "synchronous_step"]

_GRADIENT_BYTES = 2
"""Of a gradient that is reduced in every step of synchronous training, in bf16."""


@dataclass(frozen=True, kw_only=True)
class WorkerLink:
    """What lies between the workers, and how fast they are."""

    workers: int
    """How many meet."""

    parameters: int
    """Of the model."""

    step_seconds: float
    """Seconds of a worker's step, without anything that crosses workers."""

    bandwidth: float
    """Bits per second from one worker to the others, all of its links together."""

    latency: float = 0.0
    """Seconds of a message."""

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: naming it.
        """
        wanted = (
            ("--workers", self.workers, self.workers >= 2, "at least 2"),
            ("--step-seconds", self.step_seconds, 0 < self.step_seconds < math.inf, "above 0"),
            ("--bandwidth", self.bandwidth / 1e9, 0 < self.bandwidth < math.inf, "above 0"),
            ("--latency", self.latency * 1e3, 0 <= self.latency < math.inf, "0 or more"),
        )
        problems = [f"{name} is {value:g}; give a number {rule}" for name, value, fits, rule in wanted if not fits]
        if problems:
            raise combine(problems, "local-sgd suggest")


@dataclass(frozen=True, kw_only=True)
class MeetingCost:
    """A way to meet, and what it costs."""

    interval: int
    """H, steps between two rounds."""

    codec: str
    """In which the values travel."""

    delay: int
    """Steps during which training continues while a round is made."""

    round_bytes: float
    """That a worker sends in a round."""

    round_seconds: float
    """From the round's begin to its end."""

    utilisation: float
    """Part of the time in which a worker trains, from 0 to 1."""


def synchronous_step(link: WorkerLink) -> float:
    """Return the seconds of a step of synchronous training, whose gradients' all-reduce nothing hides."""
    nbytes = 2 * (link.workers - 1) / link.workers * _GRADIENT_BYTES * link.parameters
    return link.step_seconds + 8 * nbytes / link.bandwidth + 2 * (link.workers - 1) * link.latency


def compare(link: WorkerLink, intervals: Sequence[int], codecs: Sequence[str]) -> Iterator[MeetingCost]:
    """Yield what each interval costs with each codec, without a delay and with one that hides as much as it can.

    Args:
        link: between the workers.
        intervals: steps between two rounds.
        codecs: names of codecs.
    """
    for codec in codecs:
        kind = build_codec(codec)
        both = kind.nbytes(link.parameters) + kind.for_results(link.workers).nbytes(link.parameters)
        nbytes = (link.workers - 1) / link.workers * both
        seconds = 8 * nbytes / link.bandwidth + 2 * (link.workers - 1) * link.latency
        for interval in intervals:
            # A round ends before the next one begins.
            hiding = min(math.ceil(seconds / link.step_seconds), interval - 1)
            for delay in dict.fromkeys((0, hiding)):
                waiting = max(0.0, seconds - delay * link.step_seconds)
                training = interval * link.step_seconds
                yield MeetingCost(
                    interval=interval,
                    codec=codec,
                    delay=delay,
                    round_bytes=nbytes,
                    round_seconds=seconds,
                    utilisation=training / (training + waiting),
                )


def plainest(settings: Sequence[MeetingCost], target: float) -> MeetingCost | None:
    """Return the setting that changes training least among those that reach a utilisation; None where none does.

    First without a delay, then with the codec that was named first, then with the shortest interval: a longer interval
    and a coarser codec change what is learned, and a delay does it at every round.

    Args:
        settings: of `compare`, codecs from the finest to the coarsest.
        target: the utilisation, from 0 to 1.
    """
    order = {codec: place for place, codec in enumerate(dict.fromkeys(setting.codec for setting in settings))}
    reaching = [setting for setting in settings if setting.utilisation >= target]
    return min(reaching, key=lambda found: (found.delay > 0, order[found.codec], found.interval), default=None)
