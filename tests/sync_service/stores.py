# SPDX-License-Identifier: Apache-2.0
"""What a server keeps on the disk, made by hand: snapshots, and runs with rounds in them."""

from pathlib import Path
from typing import Any

import torch

from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.disk.snapshot_names import state_name
from megatron_ext.sync_service.disk.snapshot_writer import SnapshotWriter
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.server.store import RunStore

CATALOG = Catalog(
    [TensorSpec(name="a", shape=(30, 40)), TensorSpec(name="b", shape=()), TensorSpec(name="c", shape=(7,))]
)
VALUES = {spec.name: torch.randn(spec.shape, generator=torch.Generator().manual_seed(1)) for spec in CATALOG}
FIGURES: dict[str, Any] = {"digest": "", "rejected": {}, "outer_scalars": {}, "norms": {}, "bytes": 0, "seconds": 0.0}


def snapshot(path: Path, record: bytes = b"") -> Snapshot:
    writer = SnapshotWriter(path, CATALOG, ["momentum_buffer"], {"round": "7"})
    for name, value in reversed(VALUES.items()):
        writer.write(name, value)
        writer.write(state_name("momentum_buffer", name), 2 * value)
    assert not path.exists()
    writer.sync()
    writer.publish(record)
    return Snapshot(path)


def begin(store: RunStore) -> RunStore:
    store.create({"codec": "fp32"}, CATALOG)
    store.record({"event": "joined", "peer": "a", "index": 0, "instance": "x"})
    return store


def make_round(store: RunStore) -> None:
    number = store.state.open_round
    store.record({"event": "uploaded", "round": number, "peer": "a"})
    store.record(store.state.closing_event())
    made = snapshot(store.shard.snapshot_path(number))
    store.copy_snapshot(number)
    store.commit({"event": "committed", "round": number, "contributors": ["a"], **FIGURES}, made)


def make_recorded_round(store: RunStore) -> None:
    """Make a round as `make_round` does, with a record."""
    number = store.state.open_round
    event = make_unwritten_round(store)
    store.copy_snapshot(number)
    store.commit(event, Snapshot(store.shard.snapshot_path(number)))


def make_unwritten_round(store: RunStore) -> dict[str, Any]:
    """Make a round except for the line that commits it, and return that."""
    number = store.state.open_round
    store.record({"event": "uploaded", "round": number, "peer": "a"})
    store.record(store.state.closing_event())
    event: dict[str, Any] = {"event": "committed", "round": number, "contributors": ["a"], "rejected": {}}
    event |= {"digest": f"{number}", "outer_scalars": {}, "norms": {}, "bytes": 0, "seconds": 0.0}
    snapshot(store.shard.snapshot_path(number), store.run_record(event).to_bytes()).close()
    return event
