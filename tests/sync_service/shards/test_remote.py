# SPDX-License-Identifier: Apache-2.0
"""The copy of the server's state at a URL: another machine resumes from it, and nothing is lost that was committed."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from megatron_ext.errors import UserError
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.rounds.journal import Journal
from megatron_ext.sync_service.server.store import RunStore
from megatron_ext.sync_service.shards import remote as remote_module
from megatron_ext.sync_service.shards.remote import RemoteState
from tests.sync_service.service import Service
from tests.sync_service.stores import begin, make_round, snapshot
from tests.sync_service.toy_peer import start_values
from tests.sync_service.whole_runs import DILOCO, ROUNDS

MakeService = Callable[..., Service]
CONFIG = RunConfig(peers=2)


@pytest.fixture(autouse=True)
def empty_memory():
    """fsspec's memory is one for the whole process."""
    fsspec.filesystem("memory").store.clear()


def store_at(folder: Path, url: str = "memory://bucket/state") -> RunStore:
    return RunStore("r", CONFIG, folder, 2, RemoteState(url, "r"))


def test_another_machine_resumes_with_the_newest_rounds_and_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Several parts of the journal.
    monkeypatch.setattr(remote_module, "LINES", 4)
    store = begin(store_at(tmp_path / "one"))
    for _ in range(4):
        make_round(store)
    store.close()
    again = store_at(tmp_path / "two")
    assert again.state.open_round == 4 and list(again.state.members) == ["a"]
    assert sorted(again.shard.snapshots) == [2, 3]
    files = fsspec.filesystem("memory")
    parts = [files.cat_file(path) for path in sorted(files.ls("/bucket/state/r/journal", detail=False))]
    assert {part.count(b"\n") for part in parts[:-1]} == {4} and len(parts) > 3
    journals = [(tmp_path / name / "journal.jsonl").read_bytes() for name in ("one", "two")]
    assert journals[1].startswith(journals[0])
    make_round(again)
    again.close()
    # The first machine comes back: it has seen less, and takes the rest.
    back = store_at(tmp_path / "one")
    assert back.state.open_round == 5 and sorted(back.shard.snapshots) == [3, 4]


def test_a_folder_that_has_seen_more_brings_the_copy_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_module, "LINES", 3)
    alone = begin(RunStore("r", CONFIG, tmp_path / "one", 2))
    make_round(alone)
    alone.close()
    store_at(tmp_path / "one").close()
    assert store_at(tmp_path / "two").state.open_round == 1


def test_two_histories_are_refused(tmp_path: Path):
    begin(store_at(tmp_path / "one")).close()
    begin(RunStore("r", CONFIG, tmp_path / "two", 2)).close()
    with pytest.raises(UserError, match=r"state memory://bucket/state: has another history than .*two"):
        store_at(tmp_path / "two")


def test_a_server_whose_url_another_one_has_taken_over_changes_nothing_there(tmp_path: Path):
    first = begin(store_at(tmp_path / "one"))
    make_round(first)
    second = store_at(tmp_path / "two")
    make_round(second)
    files = fsspec.filesystem("memory")
    seen = dict(files.store)
    with pytest.raises(OSError, match=rf"belongs to the server with process id {os.getpid()} on .* end it"):
        first.record({"event": "joined", "peer": "b", "index": 1, "instance": "y"})
    snapshot(first.shard.snapshot_path(1))
    with pytest.raises(OSError, match="nothing that this server does counts any more"):
        first.copy_snapshot(1)
    assert list(first.state.members) == ["a"]
    assert files.store == seen
    make_round(second)
    assert store_at(tmp_path / "three").state.open_round == 3


def test_what_is_written_while_another_server_takes_over_has_not_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = begin(store_at(tmp_path / "one"))
    memory = fsspec.get_filesystem_class("memory")
    write = memory.pipe_file

    def write_late(self: Any, path: str, content: bytes, **options: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(memory, "pipe_file", write)
            store_at(tmp_path / "two")
        write(self, path, content, **options)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "pipe_file", write_late)
        with pytest.raises(OSError, match="belongs to the server"):
            first.record({"event": "joined", "peer": "b", "index": 1, "instance": "y"})
    assert list(first.state.members) == ["a"]


def test_a_server_with_another_history_does_not_take_the_url_over(tmp_path: Path):
    first = begin(store_at(tmp_path / "one"))
    begin(RunStore("r", CONFIG, tmp_path / "two", 2)).close()
    with pytest.raises(UserError, match="has another history"):
        store_at(tmp_path / "two")
    make_round(first)


def test_what_could_not_be_copied_has_not_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = begin(store_at(tmp_path / "one"))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the network is down")

    with monkeypatch.context() as patch:
        patch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", fail)
        with pytest.raises(OSError, match="state memory://bucket/state cannot be written: RuntimeError: the network"):
            store.record({"event": "joined", "peer": "b", "index": 1, "instance": "y"})
    assert list(store.state.members) == ["a"]
    store.record({"event": "joined", "peer": "c", "index": 1, "instance": "y"})
    store.close()
    for name in ("one", "two"):
        assert list(store_at(tmp_path / name).state.members) == ["a", "c"]


@pytest.mark.parametrize("failpoint", ["upload_journaled:4", "round_committed:3"])
def test_peers_resume_at_a_server_on_another_machine(
    make_service: MakeService,
    undisturbed: list[str],
    failpoint: str,
):
    service = make_service(**DILOCO)
    service.extra = {"state": f"file://{service.folder}/bucket"}
    server = service.start(failpoint)
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, seed=7) for index in range(2)]
    assert server.wait() == -signal.SIGKILL
    # The machine is lost with all that was on it.
    shutil.rmtree(service.state)
    service.start()
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    assert [event["digest"] for event in service.events("committed")] == undisturbed
    assert service.seen("p0")[ROUNDS]["digest"] == undisturbed[ROUNDS]


def test_a_copy_in_files_is_whole_whenever_a_server_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    url = f"file://{tmp_path}/remote"
    store = begin(store_at(tmp_path / "one", url))
    make_round(store)
    local = fsspec.get_filesystem_class("file")
    part = tmp_path / "remote/r/journal/part-00000000.jsonl"
    before = part.read_bytes()

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(local, "mv", die)
        with pytest.raises(KeyboardInterrupt):
            store.record({"event": "joined", "peer": "b", "index": 1, "instance": "y"})
    assert part.read_bytes() == before
    assert store_at(tmp_path / "two", url).state.open_round == 1
    assert part.read_bytes().startswith(before)


def test_a_copy_that_has_lost_its_journal_is_refused_and_keeps_its_snapshots(tmp_path: Path):
    url = f"file://{tmp_path}/remote"
    store = begin(store_at(tmp_path / "one", url))
    for _ in range(4):
        make_round(store)
    store.close()
    part = tmp_path / "remote/r/journal/part-00000000.jsonl"
    content = part.read_bytes()
    snapshots = sorted((tmp_path / "remote/r/snapshots").iterdir())
    for lost in (b"", b"".join(content.splitlines(keepends=True)[:5])):
        part.write_bytes(lost)
        with pytest.raises(UserError, match=r"has the snapshot round-00000003.safetensors, but the newest .* lost"):
            store_at(tmp_path / "two", url)
    assert sorted((tmp_path / "remote/r/snapshots").iterdir()) == snapshots
    # The folder that has seen everything brings it back.
    assert store_at(tmp_path / "one", url).state.open_round == 4
    assert part.read_bytes().startswith(content)


def test_an_owner_that_cannot_be_read_keeps_nobody_away(tmp_path: Path):
    url = f"file://{tmp_path}/remote"
    begin(store_at(tmp_path / "one", url)).close()
    (tmp_path / "remote/r/owner.json").write_text('{"tok')
    make_round(store_at(tmp_path / "one", url))


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (
            {"outer_optimizer": "adam", "outer_optimizer_lr": 0.1},
            {"outer_optimizer": "sgd"},
            "outer_optimizer is sgd, but the run was started with adam",
        ),
        ({"outer_optimizer": "sgd"}, {}, "outer_optimizer is none, but the run was started with sgd"),
        (
            {"rounds": "asynchronous"},
            {"rounds": "asynchronous", "contributions_per_step": 3},
            "contributions_per_step is 3, but the run was started with 2",
        ),
        ({"outer_optimizer": "sgd"}, {"outer_optimizer": "sgd", "outer_optimizer_lr": 0.5}, None),
    ],
    ids=["adam to sgd", "sgd to none", "contributions", "another learning rate"],
)
def test_what_kept_states_depend_on_cannot_be_changed(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], said: str | None
):
    begin(RunStore("r", RunConfig(peers=2, **first), tmp_path, 2)).close()
    if said is None:
        RunStore("r", RunConfig(peers=2, **then), tmp_path, 2)
        return
    with pytest.raises(UserError, match=said):
        RunStore("r", RunConfig(peers=2, **then), tmp_path, 2)


@pytest.mark.parametrize("then", [None, 10, 20])
def test_the_interval_of_peers_that_have_begun_cannot_be_changed(tmp_path: Path, then: int | None):
    store = RunStore("r", RunConfig(peers=2, sync_steps=10), tmp_path, 2)
    store.create({"codec": "fp32", "--sync-service-interval": "10"}, Catalog.of_tensors({"w": torch.zeros(4)}))
    store.close()
    if then != 20:
        RunStore("r", RunConfig(peers=2, sync_steps=then), tmp_path, 2)
        return
    with pytest.raises(UserError, match=r"sync_steps is 20, but the run was started with .* is 10; give"):
        RunStore("r", RunConfig(peers=2, sync_steps=then), tmp_path, 2)


def test_a_server_that_cannot_start_takes_the_url_from_nobody(make_service: MakeService):
    first, second = make_service(peers=1), make_service(peers=1)
    for service in (first, second):
        service.extra = {"state": f"file://{first.folder}/bucket"}
    first.start()
    second.address = first.address
    assert second.start().wait() == 2
    assert f"bind {first.address}: cannot listen there" in second.output
    assert not (second.state / "runs").exists()
    values = start_values(1)
    with first.client("p0", values) as client:
        client.start(values)


def test_a_snapshot_that_is_damaged_here_does_not_replace_its_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store = begin(store_at(tmp_path / "one"))
    for _ in range(3):
        make_round(store)
    store.close()
    path = store.shard.snapshot_path(2)
    there = f"/bucket/state/r/snapshots/{path.name}"
    whole = path.read_bytes()
    os.truncate(path, 100)
    with pytest.raises(UserError, match="cannot be read as a snapshot"):
        store_at(tmp_path / "one")
    assert fsspec.filesystem("memory").cat_file(there) == whole
    assert "it is not copied to memory://bucket/state" in caplog.text
    # What the error says: the folder moved away, the server resumes from the copy.
    assert sorted(store_at(tmp_path / "two").shard.snapshots) == [1, 2]


def test_a_line_that_is_here_alone_and_one_that_is_there_alone_have_not_happened_for_anyone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = begin(store_at(tmp_path / "one"))
    make_round(store)
    put = RemoteState._put_whole

    def unanswered(self: RemoteState, path: str, content: bytes) -> None:
        put(self, path, content)
        raise TimeoutError("the answer was lost")

    monkeypatch.setattr(RemoteState, "_put_whole", unanswered)
    with pytest.raises(OSError, match="the answer was lost"):
        store.record({"event": "uploaded", "round": 1, "peer": "a"})
    monkeypatch.undo()
    store.close()
    # It is killed while it tries another one, after that was written here.
    journal = Journal(tmp_path / "one/journal.jsonl")
    journal.append({"event": "left", "peer": "a"})
    journal.close()
    again = store_at(tmp_path / "one")
    assert list(again.state.members) == ["a"] and sorted(again.shard.snapshots) == [0]
    make_round(again)
    text = (tmp_path / "one/journal.jsonl").read_text()
    assert '"left"' not in text and text.count('"uploaded"') == 3
