# SPDX-License-Identifier: Apache-2.0
"""The runs in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_ext.sync_service.status_page.health import LEVELS

__all__ = ["metrics_text"]

_PREFIX = "megatron_ext_sync_"

_Sample = tuple[dict[str, str], float]


def metrics_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the newest values of runs.

    Args:
        runs: what `overview_of` makes.
    """
    families: list[tuple[str, str, str, Iterable[_Sample]]] = [
        ("open_round", "gauge", "Round that takes contributions.", _of_runs(runs, "open_round")),
        ("quorum", "gauge", "Uploads without which no round closes.", _of_runs(runs, "quorum")),
        ("peers", "gauge", "Peers that are members.", (({"run": run["run"]}, len(run["peers"])) for run in runs)),
        ("health", "gauge", f"{_levels()}.", (({"run": r["run"]}, _level(r["health"]["level"])) for r in runs)),
        ("rounds_committed_total", "counter", "Rounds that were committed.", _counts(runs, "committed")),
        ("contributions_rejected_total", "counter", "Contributions that did not count.", _counts(runs, "rejected")),
        ("peers_evicted_total", "counter", "Memberships that were ended by force.", _counts(runs, "evicted")),
        ("round_bytes", "gauge", "Bytes uploaded for the newest round.", _newest(runs, "bytes")),
        ("round_reduce_seconds", "gauge", "Time that the server took to make it.", _newest(runs, "reduce_seconds")),
        ("round_period_seconds", "gauge", "Time between the two newest rounds.", _newest(runs, "period")),
        ("round_timestamp_seconds", "gauge", "When the newest round was committed.", _newest(runs, "time")),
        ("peer_loss", "gauge", "Training loss that a peer gave for the newest round.", _by_peer(runs, "losses")),
        ("peer_norm", "gauge", "Norm of a peer's pseudo-gradient in the newest round.", _by_peer(runs, "norms")),
        ("peer_missed_rounds", "gauge", "Rounds since a peer last took part.", _of_peers(runs, "missed")),
        ("peer_last_seen_timestamp_seconds", "gauge", "When a peer last called.", _of_peers(runs, "last_seen")),
    ]
    lines = []
    for name, kind, help_text, samples in families:
        lines += [f"# HELP {_PREFIX}{name} {help_text}", f"# TYPE {_PREFIX}{name} {kind}"]
        for labels, value in samples:
            inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            lines.append(f"{_PREFIX}{name}{{{inside}}} {float(value)!r}")
    return "\n".join(lines) + "\n"


def _level(name: str) -> int:
    return [str(level) for level in LEVELS].index(name)


def _levels() -> str:
    return ", ".join(f"{number} {level}" for number, level in enumerate(LEVELS))


def _of_runs(runs: Sequence[Mapping[str, Any]], key: str) -> list[_Sample]:
    return [({"run": run["run"]}, run[key]) for run in runs]


def _counts(runs: Sequence[Mapping[str, Any]], key: str) -> list[_Sample]:
    return [({"run": run["run"]}, run["counts"][key]) for run in runs]


def _newest(runs: Sequence[Mapping[str, Any]], key: str) -> list[_Sample]:
    rounds = [(run["run"], run["rounds"][-1]) for run in runs if run["rounds"]]
    return [({"run": name}, entry[key]) for name, entry in rounds if entry[key] is not None]


def _by_peer(runs: Sequence[Mapping[str, Any]], key: str) -> list[_Sample]:
    # Round 0 is the start, whose norms are those of the values.
    rounds = [(run["run"], run["rounds"][-1]) for run in runs if run["rounds"] and run["rounds"][-1]["round"] > 0]
    return [({"run": name, "peer": peer}, value) for name, entry in rounds for peer, value in entry[key].items()]


def _of_peers(runs: Sequence[Mapping[str, Any]], key: str) -> list[_Sample]:
    peers = [(run["run"], peer) for run in runs for peer in run["peers"]]
    return [({"run": name, "peer": peer["peer"]}, peer[key]) for name, peer in peers if peer[key] is not None]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
