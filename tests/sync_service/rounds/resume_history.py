# SPDX-License-Identifier: Apache-2.0
"""What happens in the walks of test_resume_walks: checkpoints, processes, contributions, and what became of those."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_ext.sync_service.protocol.report import Progress
from megatron_ext.sync_service.protocol.resuming import Claim

BATCH = 4
LONGEST = 3
"""Steps of an interval, at most."""

UNITS = ("u", "v")
KEPT = 3
"""Rounds whose values the server keeps."""

Grains = frozenset[tuple[object, ...]]
"""What a unit has learned: from one step of one worker, or what a lossy codec has left behind of an interval."""

NOTHING: Grains = frozenset()


def at(steps: int) -> Progress:
    """Return how far a training is after a number of steps."""
    return Progress(iteration=steps, samples=BATCH * steps, schedule=float(BATCH * steps), batch=BATCH)


@dataclass(frozen=True)
class Job:
    """The processes of a peer: its workers, each of some ranks, which hold the units in turn; and its codec."""

    workers: int = 1
    ranks: int = 1
    is_lossy: bool = False

    @property
    def size(self) -> int:
        """How many ranks there are in all."""
        return self.workers * self.ranks

    def rank_of(self, worker: int, unit: str) -> int:
        """Return the rank that holds a worker's values of a unit."""
        return worker * self.ranks + UNITS.index(unit) % self.ranks


@dataclass(frozen=True)
class Saved:
    """A checkpoint, which has a file of each rank at the same step."""

    name: str
    index: int
    base: int
    digest: str
    begin: int
    done: int
    sent: int
    """How many contributions of this peer there had been."""

    residuals: Mapping[str, Grains]
    """By unit."""

    lineage: int
    """See `Process`."""


@dataclass
class Process:
    """A peer's job. Its training is as far as `begin + done`; its ranks begin and end together."""

    name: str
    index: int
    saved: Saved | None
    whole: bool
    length: int
    """Steps of this interval."""

    repeats: bool
    job: Job
    lineage: int
    """Which process has begun with weights alone: what two of one lineage make of an interval is the same."""

    base: int = -1
    digest: str = ""
    begin: int = 0
    steps: list[int] = field(default_factory=list)
    """Of this interval, by rank: between two rounds nothing makes them wait for each other."""

    uploaded: set[int] = field(default_factory=set)
    """Ranks that have sent what they hold."""

    residuals: dict[str, Grains] = field(default_factory=lambda: dict.fromkeys(UNITS, NOTHING))
    """What earlier contributions have lost by the codec, by unit."""

    claim: Claim | None = None
    """Until it is decided."""

    is_recorded: bool = False
    """Whether an earlier process has contributed this interval, which is not sent again."""

    in_flight: "Sent | None" = None
    """A contribution whose round is not applied yet."""

    def place(self, begin: int, done: int) -> None:
        """Put all ranks to the same step of an interval."""
        self.begin, self.steps = begin, [done] * self.job.size

    @property
    def done(self) -> int:
        """How many steps of the interval all ranks have made."""
        return min(self.steps)

    def contribution(self) -> dict[str, Grains]:
        """Return what the ranks have to send, by unit: every worker's steps, and the codec's residuals."""
        job = self.job
        return {
            unit: self.residuals[unit]
            | {
                (self.index, worker, self.begin + step)
                for worker in range(job.workers)
                for step in range(self.steps[job.rank_of(worker, unit)])
            }
            for unit in UNITS
        }

    def settle(self, sent: "Sent", counted_in: frozenset[str], history: int) -> None:
        """Keep what the codec has left of a contribution, of units in which that has counted."""
        left = frozenset({("left", self.index, sent.begin, sent.end, history)}) if self.job.is_lossy else NOTHING
        self.residuals |= dict.fromkeys(counted_in, left)


@dataclass(frozen=True)
class Sent:
    """What was contributed."""

    name: str
    index: int
    made_for: int
    begin: int
    end: int
    content: Mapping[str, Grains]
    """By unit."""

    lineage: int
    """Of the process."""

    def is_made_again_by(self, other: "Sent") -> bool:
        """Return whether another process has made the same interval, and the same of it as far as it can."""
        if self.lineage != other.lineage and self.made_for > 1:
            # Somebody has begun with weights alone, and then with an older checkpoint all the same.
            return replace(other, content=self.content, lineage=self.lineage) == self
        return replace(other, lineage=self.lineage) == self


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
    values: dict[str, Grains] = field(default_factory=lambda: dict.fromkeys(UNITS, NOTHING))
    """What the committed values hold, by unit."""

    def copy(self) -> "Truth":
        return Truth(list(self.digests), dict(self.pending), list(self.judged), dict(self.values))

    def count(self, sent: Sent, number: int, units: frozenset[str]) -> None:
        """Count a contribution in some units.

        Raises:
            AssertionError: some of it has counted there before.
        """
        for unit in units:
            twice = self.values[unit] & sent.content[unit]
            assert not twice, f"counts twice in {unit}: {sorted(map(str, twice))}"
            self.values[unit] |= sent.content[unit]
        self.judged.append(Judged(sent, number, units))

    def end(self, index: int) -> int | None:
        """Return where the last contribution of a part ended that was judged."""
        ends = [entry.sent.end for entry in self.judged if entry.sent.index == index]
        return ends[-1] if ends else None
