# SPDX-License-Identifier: Apache-2.0
"""What has to be true of a run's history, whatever its faults: each rule says in words where it does not hold."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.chaos.damage import REBUILT
from tests.chaos.history import End, Event, History, Struck
from tests.chaos.peer import digest_of
from tests.chaos.replay import Contribution, replayed
from tests.chaos.settings import BATCH, STEPS
from tests.chaos.task import Task

__all__ = ["RULES", "Attempt", "attempts", "lost_attempts", "violations"]

LOSS_TOLERANCE = 0.03
_FLIPS = "bit flip"
SIZE = STEPS * BATCH
"""Samples of an interval."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An interval that a process of a peer has begun."""

    peer: str
    round: int
    """That it was made for."""
    begin: int
    """Samples of its part before it."""
    at: float
    until: float
    """When its process was told what became of it, or the next process of the peer began; infinite if never."""


def violations(history: History) -> dict[str, list[str]]:
    """Return what a history violates, by rule; rules that hold are not there."""
    found = {name: list(rule(history)) for name, rule in RULES.items()}
    return {name: sentences for name, sentences in found.items() if sentences}


def attempts(history: History) -> list[Attempt]:
    """Return all intervals that peers have begun, in the order of their time."""
    found = []
    for peer in history.names:
        entries = history.said(peer, "starts", "begins", "told", "gave up")
        for place, entry in enumerate(entries):
            if entry["event"] == "begins":
                until = entries[place + 1]["at"] if place + 1 < len(entries) else float("inf")
                found.append(
                    Attempt(peer=peer, round=entry["round"], begin=entry["begin"], at=entry["at"], until=until)
                )
    return sorted(found, key=lambda attempt: attempt.at)


def lost_attempts(history: History) -> list[Attempt]:
    """Return the intervals that were made for nothing: of several for the same contribution only one counts."""
    counted = set(_counted(history))
    lost = []
    for attempt in attempts(history):
        key = attempt.peer, attempt.round
        if key in counted:
            counted.remove(key)
        else:
            lost.append(attempt)
    return lost


def _counted(history: History) -> Iterator[tuple[str, int]]:
    """Yield the peer of every contribution that counted, and the round that it was made for."""
    for number, event in sorted(history.commits().items()):
        for peer in event["contributors"] if number else ():
            yield peer, event.get("made_for", number)


def _rounds_increase(history: History) -> Iterator[str]:
    last = -1
    for event in history.events("committed"):
        if event["round"] not in (last, last + 1):
            yield f"round {event['round']} was committed after round {last}"
        last = max(last, event["round"])
    for peer in history.names:
        newest = -1
        for entry in history.said(peer, "resumes", "told"):
            if entry["round"] < newest:
                yield f"peer {peer} went back from round {newest} to {entry['round']}"
            newest = max(newest, entry["round"])


def _one_commit_per_round(history: History) -> Iterator[str]:
    first: dict[int, Event] = {}
    for event in history.events("committed"):
        known = first.setdefault(event["round"], event)
        if (event["digest"], event["contributors"]) != (known["digest"], known["contributors"]):
            yield f"round {event['round']} was committed twice, with other contributions or values"


def _contributions_count_once(history: History) -> Iterator[str]:
    waiting: dict[tuple[str, int], bool] = {}
    commits = history.commits()
    for event in history.journal:
        kind = event["event"]
        if kind == "uploaded":
            waiting[event["peer"], event["round"]] = True
        elif kind in ("forgotten", "evicted"):
            for key in [key for key in waiting if key[0] == event["peer"]]:
                del waiting[key]
        elif kind == "recovered":
            waiting = {(peer, event["round"]): True for peer in event["state"]["uploaded"]}
        elif kind == "committed":
            is_last = event is commits[event["round"]]
            yield from _commit_takes(event, waiting, history if is_last else None)
    for (peer, number), _ in waiting.items():
        if number <= max(commits, default=-1) and not history.settings.asynchronous:
            yield f"what peer {peer} had contributed to round {number} is in no round"
    yield from _told_as_committed(history)


def _commit_takes(event: Event, waiting: dict[tuple[str, int], bool], history: History | None) -> Iterator[str]:
    """Say what a commit counts that did not come; of one that a later line repeats only whether it counts twice."""
    number, peers = event["round"], [*event["contributors"], *event["rejected"]]
    if len(set(peers)) < len(peers):
        yield f"round {number} counts a peer twice: {', '.join(peers)}"
    for peer in set(peers):
        key = peer, event.get("made_for", number)
        if waiting.pop(key, None) is None and history is not None and not _was_rebuilt(history, event):
            yield f"round {number} counts a contribution of peer {peer} that the journal does not have"


def _was_rebuilt(history: History, event: Event) -> bool:
    """Return whether a line comes after a rebuilt journal, which tells of contributions in its first line alone."""
    place = history.journal.index(event)
    return place > 0 and history.journal[place - 1]["event"] in ("recovered", "started")


def _told_as_committed(history: History) -> Iterator[str]:
    counted = set(_counted(history))
    for peer in history.names:
        for entry in history.said(peer, "told"):
            if entry["contributed"] != ((peer, entry["made_for"]) in counted):
                said = "counted" if entry["contributed"] else "did not count"
                yield f"peer {peer} was told that its contribution for round {entry['made_for']} {said}, which is wrong"


def _samples_count_once(history: History) -> Iterator[str]:
    taken: dict[str, list[tuple[int, int]]] = defaultdict(list)
    ends = _ends_of_contributions(history)
    for peer, made_for in _counted(history):
        if (peer, made_for) in ends:
            taken[peer].append((ends[peer, made_for], made_for))
        else:
            yield f"peer {peer} has not written down what it contributed for round {made_for}"
    for peer, ranges in taken.items():
        ranges.sort()
        for (end, number), (later, other) in itertools.pairwise(ranges):
            begin = later - SIZE
            if begin < end:
                yield f"peer {peer}: samples {begin} to {end} of its part count in rounds {number} and {other}"


def _ends_of_contributions(history: History) -> dict[tuple[str, int], int]:
    """Return up to which sample a contribution goes, by peer and the round it was made for: what was reported last."""
    found = {}
    for peer in history.names:
        for entry in history.said(peer, "trained"):
            found[peer, entry["round"]] = entry["end"]
    for event in history.events("uploaded"):
        if "progress" in event:
            found[event["peer"], event["round"]] = event["progress"][1]
    return found


def _one_interval_lost_per_fault(history: History) -> Iterator[str]:
    free: dict[str, list[Struck]] = {
        peer: [struck for struck in history.struck if struck.touches(peer, history.settings.servers)]
        for peer in history.names
    }
    for attempt in lost_attempts(history):
        causes = [
            struck
            for struck in free[attempt.peer]
            if struck.begun <= attempt.until and attempt.at <= history.recovered(struck)
        ]
        if causes:
            # The one that is over first: the others may have to explain what is lost later.
            free[attempt.peer].remove(min(causes, key=history.recovered))
        else:
            yield (
                f"peer {attempt.peer} lost an interval for round {attempt.round} (samples from {attempt.begin}), and "
                "every fault that has struck it has cost one already"
            )


def _survivors_equal(history: History) -> Iterator[str]:
    commits = history.commits()
    for peer in history.names:
        for entry in history.said(peer, "told", "ends"):
            if entry["round"] in commits and entry["digest"] != commits[entry["round"]]["digest"]:
                yield f"peer {peer} had other values than round {entry['round']} has"
    finals = {peer: said[-1] for peer in history.names if (said := history.said(peer, "ends"))}
    if not history.settings.asynchronous and len({(end["round"], end["digest"]) for end in finals.values()}) > 1:
        yield f"peers ended at different rounds or values: {finals}"
    if len({end["model"] for end in finals.values() if "model" in end}) > 1:
        yield f"peers ended with different models: {finals}"


def _values_follow(history: History) -> Iterator[str]:
    """Work out the values of all rounds from who counted in them, with which samples."""
    settings, commits = history.settings, history.commits()
    if not settings.is_exact or not commits:
        return
    ends = _ends_of_contributions(history)
    rounds = [
        [
            Contribution(index=history.names.index(peer), begin=ends.get((peer, made_for), 0) - SIZE, made_for=made_for)
            for made_for in [commits[number].get("made_for", number)]
            for peer in commits[number]["contributors"]
        ]
        for number in range(1, max(commits) + 1)
        if number in commits
    ]
    if len(rounds) < max(commits):
        yield "rounds are missing in the journal"
        return
    for number, values in enumerate(replayed(settings, Task(settings.seed, settings.owners), rounds)):
        if digest_of(values) != commits[number]["digest"]:
            yield f"round {number} has other values than what counted in it gives"
            return


def _flips_are_found(history: History) -> Iterator[str]:
    for struck in history.struck:
        if struck.fault.kind.startswith(_FLIPS) and not struck.outcome:
            yield f"{struck.fault}: nobody has found it, and the file is still in use"
        if "could not be rebuilt" in struck.outcome:
            yield f"{struck.fault}: {struck.outcome}"


def _processes_stay(history: History) -> Iterator[str]:
    """A process may end by itself: a peer that a rebuilt journal does not know, a server that starts on a full disk."""
    for end in history.ends:
        explained = any(
            struck.begun <= end.at <= history.recovered(struck) and _ends_processes(history, struck, end)
            for struck in history.struck
        )
        if not explained:
            yield f"{end.who} ended by itself with status {end.code}: {end.said}"


def _ends_processes(history: History, struck: Struck, end: End) -> bool:
    if end.who in history.settings.servers:
        # Whatever file it is that cannot be written, in whole or in part.
        return struck.fault.kind == "full disk" and " cannot be used: " in end.said
    return struck.outcome.endswith(REBUILT)


def _all_is_well_again(history: History) -> Iterator[str]:
    if history.stuck:
        yield history.stuck


def _loss_is_near(history: History) -> Iterator[str]:
    if not history.settings.has_reference:
        return
    excess = history.loss / history.faultless_loss - 1
    if not excess <= LOSS_TOLERANCE and not history.stuck:
        yield f"the final loss {history.loss:.5f} is {excess:+.2%} from that of a run without faults"


RULES: dict[str, Callable[[History], Iterator[str]]] = {
    "rounds increase": _rounds_increase,
    "one commit per round": _one_commit_per_round,
    "contributions count once": _contributions_count_once,
    "samples count once": _samples_count_once,
    "a fault costs a peer one interval": _one_interval_lost_per_fault,
    "survivors are equal": _survivors_equal,
    "values follow from what counted": _values_follow,
    "bit flips are found": _flips_are_found,
    "processes stay": _processes_stay,
    "all is well again": _all_is_well_again,
    "the loss is that of a faultless run": _loss_is_near,
}
