# SPDX-License-Identifier: Apache-2.0
"""The figures of a run, for machines and for people."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from tests.chaos.history import History
from tests.chaos.model import attempts, lost_attempts, violations

__all__ = ["as_table", "figures"]


def figures(history: History) -> dict[str, Any]:
    """Return the figures of a run as plain data."""
    begun, lost = len(attempts(history)), len(lost_attempts(history))
    recoveries: dict[str, list[float]] = defaultdict(list)
    for struck in history.struck:
        recoveries[struck.fault.kind].append(history.recovered(struck) - struck.ended)
    commits = history.commits()
    return {
        "settings": history.settings.as_json(),
        "seconds": round(history.seconds, 1),
        "rounds": max(commits, default=-1),
        "faults": len(history.struck),
        "faults_per_hour": round(3600 * len(history.struck) / history.seconds, 1) if history.seconds else 0.0,
        "intervals": begun,
        "intervals_lost": lost,
        "goodput": round(1 - lost / begun, 4) if begun else 0.0,
        "loss": history.loss,
        "faultless_loss": history.faultless_loss,
        "recovery_seconds": {
            kind: {
                "faults": len(found),
                "median": round(statistics.median(found), 2),
                "worst": round(max(found), 2),
            }
            for kind, found in sorted(recoveries.items())
        },
        "outcomes": [f"{struck.fault.kind}: {struck.outcome}" for struck in history.struck if struck.outcome],
        "ends": [f"{end.who} ({end.code}): {end.said}" for end in history.ends],
        "violations": violations(history),
    }


def as_table(found: dict[str, Any]) -> str:
    """Return the figures for people."""
    settings = found["settings"]
    kind = "asynchronous" if settings["asynchronous"] else f"quorum {settings['quorum']} of {settings['peers']}"
    outer = "mean" if settings["outer_momentum"] is None else "outer SGD"
    lines = [
        f"seed {settings['seed']}: {settings['peers']} peers, {kind}, {settings['codec']}, {outer}; "
        f"{found['rounds']} rounds in {found['seconds']:.0f} s, {found['faults']} faults "
        f"({found['faults_per_hour']:.0f} an hour)",
        f"goodput {found['goodput']:.2%} ({found['intervals_lost']} of {found['intervals']} intervals lost), "
        f"loss {found['loss']:.5f} ({found['loss'] / found['faultless_loss'] - 1:+.2%} from a run without faults)",
        "",
        f"{'fault':<28}{'times':>6}{'recovered after s: median':>27}{'worst':>8}",
    ]
    for name, entry in found["recovery_seconds"].items():
        lines.append(f"{name:<28}{entry['faults']:>6}{entry['median']:>27.2f}{entry['worst']:>8.2f}")
    lines += ["", *(f"  {line}" for line in (*found["outcomes"], *found["ends"]))]
    violated = found["violations"]
    lines += [f"VIOLATION of '{rule}': {said}" for rule, sentences in violated.items() for said in sentences]
    lines.append("violations: none" if not violated else f"violations of {len(violated)} rules")
    return "\n".join(lines)
