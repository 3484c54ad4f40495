# SPDX-License-Identifier: Apache-2.0
"""What people want to know of a run."""

from __future__ import annotations

import time
from typing import Any

from megatron_ext.sync_service.protocol.refusal import as_utf8
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.server.store import RunStore
from megatron_ext.sync_service.shards.shards import Shards
from megatron_ext.sync_service.status_page.health import health_of

__all__ = ["overview_of", "status_of"]


def status_of(
    name: str, config: RunConfig, store: RunStore, shards: Shards, problem: str, silent: str, draining: bool
) -> dict[str, Any]:
    """Return how a run is, as plain data; to be called with its lock held.

    Args:
        name: the run id.
        config: of the run.
        store: its state.
        shards: where its values are.
        problem: why its open round cannot be made; empty when it can.
        silent: who sends no heartbeats any more, in words; empty where nobody has stopped.
        draining: whether no further round is begun.
    """
    state, newest = store.state, store.state.newest
    words = ("the server is draining" if draining else "", state.waiting_for(), silent)
    spooled = shards.spooled
    return {
        "run": name,
        "open_round": state.open_round,
        "waiting_for": "; ".join(filter(None, words)),
        "draining": draining,
        "problem": as_utf8(problem or shards.problem),
        "asynchronous": config.is_asynchronous,
        "quorum": config.policy.quorum,
        "places": config.peers,
        "model_bytes": store.catalog.nbytes if state.config is not None else 0,
        "newest_round": None if newest is None else newest.number,
        "digest": None if newest is None else newest.digest,
        "contributors": [] if newest is None else list(newest.contributors),
        "rejected": {} if newest is None else newest.rejected,
        "shards": [
            {"shard": other.number, "address": other.address, "problem": other.problem} for other in shards.others
        ],
        "peers": [
            {
                "peer": member.name,
                "index": member.index,
                "uploaded": member.name in state.uploaded,
                "bytes_uploaded": spooled.get(member.name, 0),
                "awaited": member.awaited,
                "missed": member.missed,
                "last_seen": store.history.last_seen.get(member.name),
            }
            for member in sorted(state.members.values(), key=lambda member: member.index)
        ],
    }


def overview_of(
    name: str, config: RunConfig, store: RunStore, shards: Shards, problem: str, silent: str, draining: bool
) -> dict[str, Any]:
    """Return the result of `status_of`, with the run's history and health; with its lock held.

    Args:
        name: the run id.
        config: of the run.
        store: its state.
        shards: where its values are.
        problem: why its open round cannot be made; empty when it can.
        silent: who sends no heartbeats any more, in words; empty where nobody has stopped.
        draining: whether no further round is begun.
    """
    history, now = store.history, time.time()
    found = {
        **status_of(name, config, store, shards, problem, silent, draining),
        "time": now,
        "rounds": list(history.rounds),
        "incidents": list(history.incidents),
        "indices": dict(history.indices),
        "counts": dict(history.counts),
    }
    return {**found, "health": health_of(found, now)}
