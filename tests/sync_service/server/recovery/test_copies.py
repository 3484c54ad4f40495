# SPDX-License-Identifier: Apache-2.0
"""Journals and snapshots that were copied to a URL: what one place has lost is taken from the other."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.sync_service.server.store import RunStore
from megatron_ext.sync_service.shards.remote import RemoteState
from tests.sync_service.server.recovery.lost_journals import (
    CONFIG,
    LOSSES,
    contents,
    folder_of,
    newest_round,
    run_to_the_end,
)
from tests.sync_service.service import Service
from tests.sync_service.stores import begin, make_recorded_round, make_unwritten_round
from tests.sync_service.whole_runs import DILOCO, ROUNDS

MakeService = Callable[..., Service]


def url_of(folder: Path) -> str:
    return f"file://{folder}/bucket"


@pytest.mark.parametrize("lose", LOSSES)
def test_a_folder_and_its_copy_that_have_both_lost_lines_are_recovered_together(
    make_service: MakeService,
    undisturbed: list[str],
    capsys: pytest.CaptureFixture[str],
    lose: Callable[[Path, random.Random], None],
):
    service = make_service(**DILOCO)
    url = url_of(service.folder)
    service.extra = {"state": url}
    run_to_the_end(service)
    part = service.folder / "bucket/demo/journal/part-00000000.jsonl"
    lose(part, random.Random(3))
    shutil.rmtree(service.state)
    copies = service.folder / "bucket/demo"
    before = {name: content for name, content in contents(copies).items() if name != "owner.json"}
    if service.start().exit_code is not None:
        after = {name: content for name, content in contents(copies).items() if name != "owner.json"}
        assert after == before
        recover = ["server", "recover", str(folder_of(service)), "--state", url]
        assert main([*recover, "--dry-run"]) == 0
        assert main(recover) == 0
        service.start()
    assert newest_round(service, capsys) == (ROUNDS, undisturbed[ROUNDS])
    journals = [folder_of(service) / "journal.jsonl", part]
    assert journals[0].read_bytes() == journals[1].read_bytes()


@pytest.fixture
def empty_memory() -> None:
    fsspec.filesystem("memory").store.clear()


def store_at(folder: Path) -> RunStore:
    return RunStore("r", CONFIG, folder, 2, RemoteState("memory://bucket/state", "r"))


def test_a_local_journal_that_is_lost_is_taken_from_the_copy(tmp_path: Path, empty_memory: None):
    store = begin(store_at(tmp_path / "one"))
    for _ in range(3):
        make_recorded_round(store)
    store.close()
    whole = (tmp_path / "one/journal.jsonl").read_bytes()
    (tmp_path / "one/journal.jsonl").unlink()
    again = store_at(tmp_path / "one")
    assert again.state.open_round == 3 and sorted(again.shard.snapshots) == [1, 2]
    assert (tmp_path / "one/journal.jsonl").read_bytes().startswith(whole)


def test_a_folder_with_newer_rounds_than_both_journals_drives_no_owner_away(tmp_path: Path, empty_memory: None):
    store = begin(store_at(tmp_path / "one"))
    for _ in range(3):
        make_recorded_round(store)
    store.close()
    other = begin(RunStore("r", CONFIG, tmp_path / "two", 2))
    for _ in range(6):
        make_recorded_round(other)
    other.close()
    journal = tmp_path / "two/journal.jsonl"
    journal.unlink()
    seen, before = dict(fsspec.filesystem("memory").store), contents(tmp_path / "two")
    with pytest.raises(UserError, match=r"has the snapshots round-00000004.*, but the newest round of .* is 2"):
        store_at(tmp_path / "two")
    assert fsspec.filesystem("memory").store == seen and contents(tmp_path / "two") == before


def test_a_round_that_was_made_and_copied_is_committed_on_another_machine(tmp_path: Path, empty_memory: None):
    store = begin(store_at(tmp_path / "one"))
    make_recorded_round(store)
    make_unwritten_round(store)
    store.copy_snapshot(1)
    store.close()
    again = store_at(tmp_path / "two")
    assert again.state.open_round == 2 and again.state.results[1].digest == "1"
    assert store_at(tmp_path / "three").state.open_round == 2


def test_a_round_that_was_made_and_not_copied_is_copied_before_it_is_committed(tmp_path: Path, empty_memory: None):
    store = begin(store_at(tmp_path / "one"))
    make_recorded_round(store)
    make_unwritten_round(store)
    store.close()
    assert store_at(tmp_path / "one").state.open_round == 2
    assert sorted(store_at(tmp_path / "two").shard.snapshots) == [0, 1]
