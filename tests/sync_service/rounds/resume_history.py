# SPDX-License-Identifier: Apache-2.0
"""What happens in the walks of test_resume_walks: checkpoints, processes, contributions, and what became of those."""

from dataclasses import dataclass, field

from megatron_ext.sync_service.protocol.report import Progress
from megatron_ext.sync_service.protocol.resuming import Claim

BATCH = 4
LONGEST = 3
"""Steps of an interval, at most."""

UNITS = ("u", "v")
KEPT = 3
"""Rounds whose values the server keeps."""


def at(steps: int) -> Progress:
    """Return how far a training is after a number of steps."""
    return Progress(iteration=steps, samples=BATCH * steps, schedule=float(BATCH * steps), batch=BATCH)


@dataclass(frozen=True)
class Saved:
    """A checkpoint."""

    name: str
    index: int
    base: int
    digest: str
    begin: int
    done: int
    sent: int
    """How many contributions of this peer there had been."""


@dataclass
class Process:
    """A peer's process. Its training is as far as `begin + done`."""

    name: str
    index: int
    saved: Saved | None
    whole: bool
    length: int
    """Steps of this interval."""

    repeats: bool
    base: int = -1
    digest: str = ""
    begin: int = 0
    done: int = 0
    claim: Claim | None = None
    """Until it is decided."""

    is_recorded: bool = False
    """Whether an earlier process has contributed this interval, which is not sent again."""

    in_flight: tuple[int, int, int] | None = None
    """Round, begin and end of a contribution whose round is not applied yet."""


@dataclass(frozen=True)
class Sent:
    """What was contributed."""

    name: str
    index: int
    made_for: int
    begin: int
    end: int


@dataclass(frozen=True)
class Judged:
    """What became of that."""

    sent: Sent
    round: int
    counted_in: frozenset[str]
    """Units; none where it was rejected."""


@dataclass
class Truth:
    """What has happened in the history that the server has."""

    digests: list[str] = field(default_factory=list)
    pending: dict[str, Sent] = field(default_factory=dict)
    judged: list[Judged] = field(default_factory=list)

    def copy(self) -> "Truth":
        return Truth(list(self.digests), dict(self.pending), list(self.judged))

    def end(self, index: int) -> int | None:
        """Return where the last contribution of a part ended that was judged."""
        ends = [entry.sent.end for entry in self.judged if entry.sent.index == index]
        return ends[-1] if ends else None
