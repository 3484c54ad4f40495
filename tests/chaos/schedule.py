# SPDX-License-Identifier: Apache-2.0
"""Which faults happen when: drawn from a seed, kept as JSON, and shrunk to what a violation needs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError

__all__ = ["KINDS", "SERVER", "Fault", "Kind", "draw", "read_schedule", "server_names", "shrink", "write_schedule"]

SERVER = "server"
"""The one that peers know, which decides about rounds."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is known of a kind of fault."""

    strikes: str
    """'server', 'first server' (which alone has a journal), 'peer', 'link' or 'any' (a server or a peer)."""

    shortest: float
    """Seconds."""

    longest: float
    """Seconds."""

    weight: float = 1.0
    """How often it is drawn, in relation to the others."""


KINDS: dict[str, Kind] = {
    "server killed": Kind(strikes="server", shortest=0.1, longest=3.0, weight=2.0),
    "server stopped": Kind(strikes="server", shortest=0.5, longest=6.0),
    "peer killed": Kind(strikes="peer", shortest=0.1, longest=4.0, weight=2.0),
    "peer stopped": Kind(strikes="peer", shortest=0.5, longest=8.0),
    "no way up": Kind(strikes="link", shortest=1.0, longest=12.0),
    "no way down": Kind(strikes="link", shortest=1.0, longest=12.0),
    "slow link": Kind(strikes="link", shortest=2.0, longest=6.0),
    "slow disk": Kind(strikes="server", shortest=2.0, longest=6.0),
    "full disk": Kind(strikes="server", shortest=0.5, longest=5.0),
    "clock jump": Kind(strikes="any", shortest=0.0, longest=0.0),
    "corrupt frames up": Kind(strikes="link", shortest=2.0, longest=2.0),
    "corrupt frames down": Kind(strikes="link", shortest=2.0, longest=2.0),
    "poisoned values": Kind(strikes="peer", shortest=1.0, longest=1.0),
    "bit flip in the snapshot": Kind(strikes="server", shortest=0.1, longest=0.5),
    "bit flip in the journal": Kind(strikes="first server", shortest=0.1, longest=0.5),
    "bit flip in the spool": Kind(strikes="server", shortest=0.1, longest=0.5),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault."""

    kind: str
    """Of `KINDS`."""

    at: float
    """Seconds after all peers have begun."""

    seconds: float
    """How long it lasts; of what is killed, how long until it is started again."""

    target: str
    """A server's name, or a peer's: also that of its link."""

    dice: int
    """Decides what else there is to decide: which bit, how slow, how far."""

    def __str__(self) -> str:
        """Return it for people."""
        return f"{self.at:7.1f} s  {self.kind:<26} {self.target:<8} {self.seconds:5.1f} s"


_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "kind": ((str,), "a text"),
    "at": ((int, float), "a number of seconds"),
    "seconds": ((int, float), "a number of seconds"),
    "target": ((str,), "a text"),
    "dice": ((int,), "an integer"),
}


def server_names(shards: int) -> tuple[str, ...]:
    """Return what the servers of a run are called, the first one first."""
    return (SERVER, *(f"shard{shard}" for shard in range(1, shards)))


def draw(
    seed: int, *, seconds: float, faults_per_hour: float, peers: Sequence[str], servers: Sequence[str] = (SERVER,)
) -> tuple[Fault, ...]:
    """Return the faults of a seed, in the order of their time; at most one at a time strikes the same process or link.

    Args:
        seed: decides all.
        seconds: the last fault has ended by then.
        faults_per_hour: how many begin, in the mean.
        peers: names of the peers.
        servers: names of the servers.

    Raises:
        UserError: there is no room for one.
    """
    dice = random.Random(f"schedule {seed}")
    found: list[Fault] = []
    busy: dict[str, float] = {}
    at = 0.0
    while True:
        at += dice.expovariate(faults_per_hour / 3600)
        (name,) = dice.choices(list(KINDS), [kind.weight for kind in KINDS.values()])
        kind = KINDS[name]
        lasts = dice.uniform(kind.shortest, kind.longest)
        places = _places(kind, peers, servers)
        target, more = dice.choice(places), dice.getrandbits(32)
        if at + lasts > seconds:
            break
        if busy.get(target, 0.0) > at:
            continue
        busy[target] = at + lasts
        found.append(
            Fault(kind=name, at=round(at, 2), seconds=round(lasts, 2), target=target, dice=more)
        )
    if not found:
        raise UserError(
            f"--seed {seed}: no fault fits into {seconds / 60:g} minutes at {faults_per_hour:g} an hour; "
            "raise --minutes or --faults-per-hour, or take another seed"
        )
    return tuple(found)


def _places(kind: Kind, peers: Sequence[str], servers: Sequence[str]) -> tuple[str, ...]:
    """Return what a kind of fault can strike."""
    found = {"server": (*servers,), "first server": (SERVER,), "any": (*servers, *peers)}
    return found.get(kind.strikes, tuple(peers))


def write_schedule(path: Path, faults: Sequence[Fault]) -> None:
    """Write faults to a file, a line each."""
    path.write_text("".join(json.dumps(asdict(fault)) + "\n" for fault in faults))


def read_schedule(
    path: Path, *, seconds: float, peers: Sequence[str], servers: Sequence[str] = (SERVER,)
) -> tuple[Fault, ...]:
    """Read faults from a file.

    Args:
        path: of the file.
        seconds: how long faults may happen.
        peers: names of the peers.
        servers: names of the servers.

    Raises:
        UserError: there is no such file, or a line of it cannot be a fault of this run; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"--schedule {path}: is not text; give a file that a run has written") from error
    except OSError as error:
        raise UserError(f"--schedule {path}: {error.strerror}; give a file that a run has written") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"--schedule {path}: line {number} is not JSON; give a file of a run") from error
        problem = _problem_of_fields(content)
        if problem:
            raise UserError(f"--schedule {path}: line {number}: {problem}")
        fault = Fault(**content)
        problem = _problem(fault, seconds, peers, servers)
        if problem:
            raise UserError(f"--schedule {path}: line {number}: {problem}")
        found.append(fault)
    return tuple(sorted(found, key=lambda fault: fault.at))


def _problem_of_fields(content: Any) -> str:
    """Return the problems of the names and types of a line's fields; empty where nothing is."""
    if not isinstance(content, dict):
        return f"is {content!r:.40}; give an object with {', '.join(_FIELDS)}"
    if content.keys() != _FIELDS.keys():
        lacking, unknown = _FIELDS.keys() - content.keys(), content.keys() - _FIELDS.keys()
        found = [f"{name!r:.40} is not a field of a fault" for name in sorted(unknown)]
        found += [f"{name!r} is not given" for name in _FIELDS if name in lacking]
        return f"{', '.join(found)}; give {', '.join(_FIELDS)}"
    for name, (types, what) in _FIELDS.items():
        if not isinstance(content[name], types) or isinstance(content[name], bool):
            return f"{name} is {content[name]!r:.40}; give {what}"
    return ""


def _problem(fault: Fault, seconds: float, peers: Sequence[str], servers: Sequence[str]) -> str:
    if fault.kind not in KINDS:
        return f"kind is {fault.kind!r}; use one of {', '.join(KINDS)}"
    places = _places(KINDS[fault.kind], peers, servers)
    if fault.target not in places:
        return f"target is {fault.target!r}; {fault.kind!r} strikes {', '.join(places)}"
    over = fault.at + fault.seconds
    if not (fault.at >= 0 and fault.seconds >= 0 and over <= seconds):
        return f"it lasts until second {over:g}, but the run has {seconds:g} for faults; raise --minutes"
    return ""


def shrink(
    faults: Sequence[Fault], fails: Callable[[Sequence[Fault]], bool], *, tries: int
) -> tuple[Fault, ...]:
    """Return fewer of some faults that still lead to a failure: delta debugging (Zeller, Hildebrandt, 2002, ddmin).

    Args:
        faults: which fail.
        fails: says whether a run with some of them fails.
        tries: how many runs are made at most.
    """
    kept, parts = list(faults), 2
    while len(kept) > 1 and tries > 0:
        size = -(-len(kept) // parts)
        chunks = [kept[at : at + size] for at in range(0, len(kept), size)]
        without = [[fault for other in chunks if other is not chunk for fault in other] for chunk in chunks]
        for fewer in (*chunks, *(without if len(chunks) > 2 else ())):
            if tries == 0:
                break
            tries -= 1
            if fails(fewer):
                parts = 2 if fewer in chunks else max(len(chunks) - 1, 2)
                kept = fewer
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(kept))
    return tuple(kept)
