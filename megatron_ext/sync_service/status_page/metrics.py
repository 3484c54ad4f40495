# SPDX-License-Identifier: Apache-2.0
"""The runs in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.extras import pip_install
from megatron_ext.sync_service.status_page.health import LEVELS

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily as Counter
    from prometheus_client.core import GaugeMetricFamily as Gauge
    from prometheus_client.registry import Collector
except ImportError as problem:
    raise UserError(
        f"the sync service's metrics need the package prometheus-client ({problem}); install it with: "
        f"{pip_install('prometheus-client')}"
    ) from problem

__all__ = ["metrics_text"]

_PREFIX = "megatron_ext_sync_"

_Sample = tuple[dict[str, str], float]


def metrics_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the newest values of runs.

    Args:
        runs: what `overview_of` makes.
    """
    # One of its own for every answer: nothing but these runs is in it, whatever else the process should measure.
    registry = CollectorRegistry()
    registry.register(_Runs(runs))
    return generate_latest(registry).decode()


class _Runs(Collector):
    """Gives the values of runs to a registry."""

    def __init__(self, runs: Sequence[Mapping[str, Any]]) -> None:
        self._runs = runs

    def describe(self) -> Iterable[Any]:
        """Name nothing: the registry need not ask for the values to learn the names."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield the families with their samples."""
        runs = self._runs
        families: list[tuple[str, type, str, Iterable[_Sample]]] = [
            ("open_round", Gauge, "Round that takes contributions.", _of_runs(runs, "open_round")),
            ("quorum", Gauge, "Uploads without which no round closes.", _of_runs(runs, "quorum")),
            ("peers", Gauge, "Peers that are members.", _members(runs)),
            ("health", Gauge, f"{_levels()}.", _healths(runs)),
            ("rounds_committed_total", Counter, "Rounds that were committed.", _counts(runs, "committed")),
            ("contributions_rejected_total", Counter, "Contributions that did not count.", _counts(runs, "rejected")),
            ("peers_evicted_total", Counter, "Memberships that were ended by force.", _counts(runs, "evicted")),
            ("round_bytes", Gauge, "Bytes uploaded for the newest round.", _newest(runs, "bytes")),
            ("round_reduce_seconds", Gauge, "Time that the server took to make it.", _newest(runs, "reduce_seconds")),
            ("round_period_seconds", Gauge, "Time between the two newest rounds.", _newest(runs, "period")),
            ("round_timestamp_seconds", Gauge, "When the newest round was committed.", _newest(runs, "time")),
            ("peer_loss", Gauge, "Training loss that a peer gave for the newest round.", _by_peer(runs, "losses")),
            ("peer_norm", Gauge, "Norm of a peer's pseudo-gradient in the newest round.", _by_peer(runs, "norms")),
            ("peer_missed_rounds", Gauge, "Rounds since a peer last took part.", _of_peers(runs, "missed")),
            ("peer_last_seen_timestamp_seconds", Gauge, "When a peer last called.", _of_peers(runs, "last_seen")),
        ]
        for name, kind, help_text, samples in families:
            family = kind(_PREFIX + name, help_text)
            for labels, value in samples:
                family.add_sample(_PREFIX + name, labels, value)
            yield family


def _members(runs: Sequence[Mapping[str, Any]]) -> list[_Sample]:
    return [({"run": run["run"]}, len(run["peers"])) for run in runs]


def _healths(runs: Sequence[Mapping[str, Any]]) -> list[_Sample]:
    levels = [str(level) for level in LEVELS]
    return [({"run": run["run"]}, levels.index(run["health"]["level"])) for run in runs]


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
