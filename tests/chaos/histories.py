# SPDX-License-Identifier: Apache-2.0
"""A history in which nothing is wrong, made by hand, for tests that change it."""

from typing import Any

from tests.chaos.history import History, Struck
from tests.chaos.peer import digest_of
from tests.chaos.replay import Contribution, faultless, replayed
from tests.chaos.schedule import Fault
from tests.chaos.settings import BATCH, STEPS, Settings
from tests.chaos.task import Task

SIZE = STEPS * BATCH
FIRST = Contribution(index=0, begin=0, made_for=0)
"""What publishes the start."""
ROUNDS = [[0, 1, 2], [0, 2], [0, 1, 2], [0, 1, 2]]
"""Which peers count in rounds 1 to 4: peer 1 was killed in the second one."""


def history() -> History:
    """Return it: three peers, one second a round."""
    settings = Settings(seed=3, quorum=2)
    task = Task(settings.seed, settings.owners)
    taken = [0, 0, 0]
    contributions = []
    for counting in ROUNDS:
        number = len(contributions) + 1
        contributions.append([Contribution(index=i, begin=taken[i], made_for=number) for i in counting])
        for index in counting:
            taken[index] += SIZE
    values = list(replayed(settings, task, contributions))
    found = History(settings=settings, stop=4, seconds=5.0)
    found.peers = {name: [] for name in found.names}
    for number, content in enumerate(values):
        _add_round(found, number, digest_of(content), contributions[number - 1] if number else [FIRST])
    for name in found.names:
        _write(found, name, "ends", 4.95, round=4, digest=digest_of(values[-1]))
    killed = Fault(kind="peer killed", at=1.2, seconds=0.5, target="p1", dice=0)
    found.struck = [Struck(fault=killed, begun=1.2, ended=1.7)]
    found.loss = task.loss(values[-1])
    found.faultless_loss = task.loss(faultless(settings, task, 4))
    return found


def _add_round(found: History, number: int, digest: str, contributions: list[Contribution]) -> None:
    """Add a round, which is committed at the second that it is called after."""
    peers = [f"p{entry.index}" for entry in contributions]
    begins = {entry.index: entry.begin for entry in contributions}
    for index, begin in begins.items():
        progress = [(begin + SIZE) // BATCH, begin + SIZE, begin + SIZE, BATCH] if number else [0, 0, 0, BATCH]
        _journal(found, "uploaded", number - 0.5, round=number, peer=f"p{index}", progress=progress)
    _journal(found, "closed", number - 0.4, round=number, peers=peers, missing=[])
    _journal(
        found, "committed", float(number), round=number, digest=digest, contributors=peers, rejected={}
    )
    for index, name in enumerate(found.names):
        if number == 0:
            _write(found, name, "starts", -0.9, round=0, samples=0, whole=False)
            _write(found, name, "resumes", 0.05, round=0, samples=0, digest=digest)
            continue
        begin = begins.get(index, SIZE)
        _write(found, name, "begins", number - 0.9, round=number, begin=begin)
        if index not in begins:
            _write(found, name, "starts", number - 0.3, round=number - 1, samples=begin, whole=True)
            _write(found, name, "resumes", number + 0.05, round=number, samples=begin, digest=digest)
            continue
        _write(found, name, "trained", number - 0.6, round=number, begin=begin, end=begin + SIZE)
        told: dict[str, Any] = {"contributed": True, "contributors": peers, "message": ""}
        end = begin + SIZE
        _write(found, name, "told", number + 0.05, made_for=number, end=end, round=number, digest=digest, **told)


def _journal(found: History, event: str, seen: float, **said: Any) -> None:
    found.journal.append({"event": event, "seen": seen, **said})


def _write(found: History, name: str, event: str, at: float, **said: Any) -> None:
    found.peers[name].append({"event": event, "at": at, **said})
