# SPDX-License-Identifier: Apache-2.0
"""What a round of local SGD costs in bytes and time, and what of a run's time that leaves for training.

A worker sends its message for every other worker's share of the values and gets theirs, then the same with the results:
as many bytes as a ring's all-reduce. So a round of n values among W workers moves, from each of them,

    bytes(round) = (W - 1) / W * (out(n) + home(n)),        seconds(round) = 8 bytes / bandwidth + 2 (W - 1) latency,

out and home being the codec's bytes of n values. Training continues for a delay of tau steps, the second half of which,
rounded down, is for the way home, so that with the seconds of each way

    waiting = max(0, out - ceil(tau / 2) step) + max(0, home - floor(tau / 2) step),
    utilisation = H step / (H step + waiting).

Of a model in P fragments (Streaming DiLoCo, arXiv 2501.18512) each has a round of its own values, H / P steps after
the one before; as long as tau is at most H / P these do not share the link, and waiting is the sum over the fragments.
A token of all workers together takes step / (utilisation W tokens), tokens being those of a worker's step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from megatron_ext.errors import combine
from megatron_ext.outer.codecs.all_codecs import build_codec
from megatron_ext.outer.codecs.codec import Codec

__all__ = [
    "MeetingCost",
    "WorkerLink",
    "best",
    "compare",
    "gradient_bytes",
    "message_bytes",
    "plainest",
    "synchronous_step",
    "way_seconds",
]

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

    step_tokens: int | None = None
    """Of a worker's step; None where times per token are not asked for."""

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
            ("--step-tokens", self.step_tokens, self.step_tokens is None or self.step_tokens >= 1, "of at least 1"),
        )
        problems = [f"{name} is {value:g}; give a number {rule}" for name, value, fits, rule in wanted if not fits]
        if problems:
            raise combine(problems, "local-sgd suggest")

    def token_seconds(self, utilisation: float) -> float | None:
        """Return the seconds of a token of all workers together, to `math.inf` where none is trained."""
        if self.step_tokens is None:
            return None
        return self.step_seconds / self.workers / self.step_tokens / utilisation if utilisation > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class MeetingCost:
    """A way to meet, and what it costs."""

    interval: int
    """H, steps between two rounds."""

    codec: str
    """In which the values travel."""

    fragments: int
    """P, parts of the model, each with a round of its own."""

    delay: int
    """Steps during which training continues while a round is made."""

    round_bytes: float
    """That a worker sends in a round of all fragments."""

    round_seconds: float
    """From the round's begin to its end, the sum over all fragments."""

    utilisation: float
    """Part of the time in which a worker trains, from 0 to 1."""

    step_seconds: float
    """Of a step with its part of the round's waiting."""

    token_seconds: float | None
    """Of a token of all workers together; None where a step's tokens are not known."""


def message_bytes(codec: Codec, values: int, workers: int) -> tuple[float, float]:
    """Return the bytes that a worker sends in a round: outward to the owners of values, and homeward as an owner.

    Args:
        codec: of the pseudo-gradients.
        values: of the worker that the round moves.
        workers: how many meet.
    """
    share = (workers - 1) / workers
    return share * codec.nbytes(values), share * codec.for_results(workers).nbytes(values)


def way_seconds(nbytes: float, bandwidth: float, latency: float, workers: int) -> float:
    """Return the seconds of one way of a round, outward or homeward.

    Args:
        nbytes: that go through a link.
        bandwidth: of the link, in bits per second.
        latency: of a message, in seconds.
        workers: how many meet.
    """
    return 8 * nbytes / bandwidth + (workers - 1) * latency


def gradient_bytes(parameters: int, workers: int) -> float:
    """Return the bytes that a worker sends in a step of synchronous training: a ring's all-reduce in bf16."""
    return 2 * (workers - 1) / workers * _GRADIENT_BYTES * parameters


def synchronous_step(link: WorkerLink, hidden: float = 0.0) -> float:
    """Return the seconds of a step of synchronous training.

    Args:
        link: between the workers.
        hidden: seconds of the step during which gradients travel while the step computes; 0 where nothing hides them.
    """
    nbytes = gradient_bytes(link.parameters, link.workers)
    seconds = 8 * nbytes / link.bandwidth + 2 * (link.workers - 1) * link.latency
    return link.step_seconds + max(0.0, seconds - hidden)


def compare(
    link: WorkerLink,
    intervals: Sequence[int],
    codecs: Sequence[str],
    fragments: Sequence[Sequence[int]] = (),
) -> Iterator[MeetingCost]:
    """Yield what each interval costs with each codec, without a delay and with one that hides as much as it can.

    Without a delay the model is whole: fragments then lower the most that is sent at a time, and no time.

    Args:
        link: between the workers.
        intervals: steps between two rounds.
        codecs: names of codecs.
        fragments: of every way to cut the model, the values of its fragments; it is also looked at whole.
    """
    whole = [link.parameters]
    for codec in codecs:
        kind = build_codec(codec)
        for interval in intervals:
            for values in (whole, *fragments):
                ways = [_Ways.of(link, kind, part) for part in values]
                delay = _hiding_delay(ways, interval, link.step_seconds)
                if values == whole:
                    yield _cost(link, ways, interval=interval, codec=codec, delay=0)
                if delay:
                    yield _cost(link, ways, interval=interval, codec=codec, delay=delay)


@dataclass(frozen=True)
class _Ways:
    """A round of one fragment."""

    nbytes: float
    out: float
    home: float

    @classmethod
    def of(cls, link: WorkerLink, codec: Codec, values: int) -> Self:
        ways = message_bytes(codec, values, link.workers)
        return cls(sum(ways), *(way_seconds(nbytes, link.bandwidth, link.latency, link.workers) for nbytes in ways))

    def waiting(self, delay: int, step: float) -> float:
        return max(0.0, self.out - (delay - delay // 2) * step) + max(0.0, self.home - delay // 2 * step)


def _hiding_delay(ways: Sequence[_Ways], interval: int, step: float) -> int:
    """Return the shortest delay that hides all that one can: a round ends before the next one begins."""
    most = interval - 1 if len(ways) == 1 else min(interval // len(ways), interval - 1)
    steps = max(max(way.out, way.home) for way in ways) / step
    return most if 2 * steps >= most else 2 * math.ceil(steps)


def _cost(link: WorkerLink, ways: Sequence[_Ways], *, interval: int, codec: str, delay: int) -> MeetingCost:
    training = interval * link.step_seconds
    total = training + sum(way.waiting(delay, link.step_seconds) for way in ways)
    utilisation = training / total
    return MeetingCost(
        interval=interval,
        codec=codec,
        fragments=len(ways),
        delay=delay,
        round_bytes=sum(way.nbytes for way in ways),
        round_seconds=sum(way.out + way.home for way in ways),
        utilisation=utilisation,
        step_seconds=total / interval,
        token_seconds=link.token_seconds(utilisation),
    )


def plainest(settings: Sequence[MeetingCost], target: float) -> MeetingCost | None:
    """Return the setting that changes training least among those that reach a utilisation; None where none does.

    First without a delay, then with the codec that was named first, then with the shortest interval: a longer interval
    and a coarser codec change what is learned, and a delay does it at every round. Then with the shortest delay, which
    more fragments have, and with the fewest fragments that have it.

    Args:
        settings: of `compare`, codecs from the finest to the coarsest.
        target: the utilisation, from 0 to 1.
    """
    order = {codec: place for place, codec in enumerate(dict.fromkeys(setting.codec for setting in settings))}
    reaching = [setting for setting in settings if setting.utilisation >= target]
    return min(
        reaching,
        key=lambda found: (found.delay > 0, order[found.codec], found.interval, found.delay, found.fragments),
        default=None,
    )


def best(settings: Sequence[MeetingCost], target: float) -> MeetingCost:
    """Return the plainest setting that reaches a utilisation, else the first one of the highest."""
    return plainest(settings, target) or max(settings, key=lambda setting: setting.utilisation)
