# SPDX-License-Identifier: Apache-2.0
"""The figures of a run, for machines and for people."""

from __future__ import annotations

import statistics
from collections import defaultdict
from itertools import pairwise
from typing import Any

from tests.chaos.history import History
from tests.chaos.model import attempts, lost_attempts, violations

__all__ = ["as_table", "figures", "goodput_in_time", "kind_of", "said_of_violations"]


def figures(history: History) -> dict[str, Any]:
    """Return the figures of a run as plain data."""
    begun, lost = len(attempts(history)), len(lost_attempts(history))
    recoveries: dict[str, list[float]] = defaultdict(list)
    for struck in history.struck:
        recoveries[struck.fault.kind].append(history.recovered(struck) - struck.ended)
    commits = history.commits()
    all_recoveries = [seconds for found in recoveries.values() for seconds in found]
    return {
        "settings": history.settings.as_json(),
        "seconds": round(history.seconds, 1),
        "rounds": max(commits, default=-1),
        "faults": len(history.struck),
        "faults_per_hour": round(3600 * len(history.struck) / history.seconds, 1) if history.seconds else 0.0,
        "intervals": begun,
        "intervals_lost": lost,
        "goodput": round(1 - lost / begun, 4) if begun else 0.0,
        "goodput_in_time": goodput_in_time(history),
        "median_recovery_seconds": round(statistics.median(all_recoveries), 2) if all_recoveries else None,
        "loss": history.loss,
        "faultless_loss": history.faultless_loss,
        "recovery_seconds": {
            kind: {
                "faults": len(found),
                "median": round(statistics.median(found), 2),
                "worst": round(max(found), 2),
                "all": [round(seconds, 2) for seconds in found],
            }
            for kind, found in sorted(recoveries.items())
        },
        "outcomes": [f"{struck.fault.kind}: {struck.outcome}" for struck in history.struck if struck.outcome],
        "ends": [f"{end.who} ({end.code}): {end.said}" for end in history.ends],
        "violations": violations(history),
    }


def goodput_in_time(history: History) -> float | None:
    """Return what counted in a second of the run over what counted in one without a fault; None without such seconds.

    Those are the seconds of the second run, where one without faults was made: jobs take longer to come back than from
    one fault to the next. Of others they are the run's own in which no fault lasts, until every peer has counted again.
    Intervals that wait for a server are not lost, and late.
    """
    work, seconds = _counted(history)
    other = history.faultless
    quiet_work, quiet_seconds = _counted_in_quiet(history) if other is None else _counted(other)
    if not quiet_work or not quiet_seconds or not seconds:
        return None
    return round(work / seconds * quiet_seconds / quiet_work, 4)


def _counted(history: History) -> tuple[int, float]:
    """Return how many contributions counted, and in how many seconds: from the first commit to the last."""
    commits = _commits(history)
    seconds = commits[-1]["seen"] - commits[0]["seen"] if commits else 0.0
    return sum(len(event["contributors"]) for event in commits[1:]), seconds


def _counted_in_quiet(history: History) -> tuple[int, float]:
    """Return the same of the seconds in which no fault lasts."""
    faults = [(struck.begun, history.recovered(struck)) for struck in history.struck]
    work, seconds = 0, 0.0
    for before, after in pairwise(_commits(history)):
        start, end = before["seen"], after["seen"]
        if not any(begun < end and recovered > start for begun, recovered in faults):
            work += len(after["contributors"])
            seconds += end - start
    return work, seconds


def _commits(history: History) -> list[dict[str, Any]]:
    return sorted(history.commits().values(), key=lambda event: event["seen"])


def kind_of(settings: dict[str, Any]) -> str:
    """Return how the peers of a run meet."""
    kind = "asynchronous" if settings["asynchronous"] else f"quorum {settings['quorum']} of {settings['peers']}"
    step = "mean" if settings["outer_momentum"] is None else "outer SGD"
    said = {
        "guards": settings["guarded"],
        "experts": settings["experts"],
        "TLS": settings["tls"],
        f"{settings['shards']} servers": settings["shards"] > 1,
    }
    return ", ".join([kind, settings["codec"], step, *(text for text, holds in said.items() if holds)])


def as_table(found: dict[str, Any]) -> str:
    """Return the figures for people."""
    settings = found["settings"]
    lines = [
        f"seed {settings['seed']}: {settings['peers']} peers, {kind_of(settings)}; "
        f"{found['rounds']} rounds in {found['seconds']:.0f} s, {found['faults']} faults "
        f"({found['faults_per_hour']:.0f} an hour)",
        f"goodput {found['goodput']:.2%} ({found['intervals_lost']} of {found['intervals']} intervals lost), "
        f"in time {_percent(found['goodput_in_time'])}, "
        f"loss {found['loss']:.5f} ({found['loss'] / found['faultless_loss'] - 1:+.2%} from a run without faults)",
        "",
        f"{'fault':<28}{'times':>6}{'recovered after s: median':>27}{'worst':>8}",
    ]
    if found["recovery_seconds"]:
        worst = max(entry["worst"] for entry in found["recovery_seconds"].values())
        lines.append(f"{'all':<28}{found['faults']:>6}{found['median_recovery_seconds']:>27.2f}{worst:>8.2f}")
    for name, entry in found["recovery_seconds"].items():
        lines.append(f"{name:<28}{entry['faults']:>6}{entry['median']:>27.2f}{entry['worst']:>8.2f}")
    lines += ["", *(f"  {line}" for line in (*found["outcomes"], *found["ends"]))]
    violated = found["violations"]
    lines += said_of_violations(found)
    lines.append("violations: none" if not violated else f"violations of {len(violated)} rules")
    return "\n".join(lines)


def said_of_violations(found: dict[str, Any]) -> list[str]:
    """Return a line for every violation."""
    return [f"VIOLATION of '{rule}': {said}" for rule, sentences in found["violations"].items() for said in sentences]


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"
