# SPDX-License-Identifier: Apache-2.0
"""What a snapshot says of its run: all that the journal had said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.cli.main import main
from megatron_ext.sync_service.rounds.asynchronous import AsynchronousState
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.rounds.journal import read_journal
from megatron_ext.sync_service.rounds.round import RunState
from megatron_ext.sync_service.rounds.run_record import RunRecord
from megatron_ext.sync_service.server.store import RunStore
from tests.sync_service.server.recovery.lost_journals import (
    folder_of,
    run_to_the_end,
)
from tests.sync_service.service import Service
from tests.sync_service.stores import begin, snapshot
from tests.sync_service.whole_runs import DILOCO

MakeService = Callable[..., Service]


@pytest.mark.parametrize("options", [{}, {"rounds": "asynchronous", "step_weights": True}], ids=["all", "asynchronous"])
def test_a_snapshot_tells_of_its_run_all_that_the_journal_had_told(make_service: MakeService, options: dict[str, Any]):
    service = make_service({"demo": {"peers": 2, **DILOCO, **options}})
    run_to_the_end(service)
    folder, config = folder_of(service), RunConfig(peers=2, **DILOCO, **options)
    events = [event for event in read_journal(folder / "journal.jsonl").events]
    newest = max(event["round"] for event in events if event["event"] == "committed")
    store = RunStore("demo", config, folder, 2)
    snapshot_of_newest = store.shard.snapshots[newest]
    store.close()
    told, rebuilt = type(store.state)(config.policy), type(store.state)(config.policy)
    for event in events:
        told.apply(event)
        if event["event"] == "committed" and event["round"] == newest:
            break
    record = RunRecord.of(snapshot_of_newest)
    assert record is not None and record.number == newest
    # The room that was left for it was large enough.
    assert "outer:record" in snapshot_of_newest and "outer:record.rest" not in snapshot_of_newest
    for event in json.loads(json.dumps(record.events())):
        rebuilt.apply(event)
    assert json.dumps(rebuilt.as_json()) == json.dumps(told.as_json())
    assert rebuilt.as_json()["results"] and rebuilt.as_json()["members"]


@pytest.mark.parametrize("kind", [RunState, AsynchronousState])
def test_nothing_of_a_state_is_missing_in_what_a_snapshot_tells_of_it(kind: type[RunState]):
    told, rebuilt = (kind(RunConfig(peers=2).policy) for _ in range(2))
    created = {"event": "created", "config": {"codec": "fp32"}, "catalog": [], "peers": 2, "protocol": 3}
    joined = {"event": "joined", "peer": "a", "index": 0, "instance": "i", "alive_seconds": 15.0}
    for event in (created, {**joined, "certificate": "site-a"}, {**joined, "peer": "b", "index": 1}):
        told.apply(event)
    told.apply({"event": "uploaded", "round": 0, "peer": "a", "steps": 1, "progress": [1, 8, 2.5, 8]})
    told.apply({"event": "evicted", "peer": "b", "reason": "it was in the way"})
    rebuilt.apply(json.loads(json.dumps({"event": "recovered", "round": 0, "state": told.as_json()})))
    assert vars(rebuilt) == vars(told) and rebuilt.certificates == {"a": "site-a"}


def test_what_a_peer_has_trained_is_counted_by_a_recovered_server_as_before(tmp_path: Path):
    store = RunStore("r", RunConfig(peers=1), tmp_path, 2)
    begin(store)
    committed: dict[str, Any] = {"event": "committed", "digest": "", "contributors": ["a"], "rejected": {}}
    committed |= {"outer_scalars": {"step": 1.0}, "norms": {}, "bytes": 0, "seconds": 0.0}
    for number in (0, 1):
        store.record({"event": "uploaded", "round": number, "peer": "a", "progress": [number, 8 * number, 2.5, 8]})
        store.record(store.state.closing_event())
        record = store.run_record({**committed, "round": number})
        written = snapshot(store.shard.snapshot_path(number), record.to_bytes())
        store.commit(record.committed, written)
    counted = store.state.counted
    store.close()
    (tmp_path / "journal.jsonl").unlink()
    assert main(["server", "recover", str(tmp_path)]) == 0
    again = RunStore("r", RunConfig(peers=1), tmp_path, 2)
    assert again.state.counted == counted and counted[0].samples == 8
    assert again.state.outer_scalars == {"step": 1.0} and again.state.open_round == 2
