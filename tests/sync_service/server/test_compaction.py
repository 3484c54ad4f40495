# SPDX-License-Identifier: Apache-2.0
"""A long journal is shortened to its newest rounds, and nothing that a run needs is lost with the others."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.sync_service.disk.durable import replace_file
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.rounds.journal import read_journal
from megatron_ext.sync_service.server import compaction
from megatron_ext.sync_service.server import store as store_module
from megatron_ext.sync_service.server.compaction import compact
from megatron_ext.sync_service.server.store import RunStore
from megatron_ext.sync_service.shards import remote
from megatron_ext.sync_service.shards.remote import RemoteState
from tests.support.waiting import until
from tests.sync_service.service import Service
from tests.sync_service.stores import begin, make_recorded_round, make_round, make_unwritten_round
from tests.sync_service.whole_runs import DILOCO, ROUNDS

MakeService = Callable[..., Service]
CONFIG = RunConfig(peers=2, outer_optimizer="sgd", outer_optimizer_lr=0.7)
URL = "memory://bucket/state"


def run_in(folder: Path, rounds: int, *, url: str | None = None) -> RunStore:
    """Return the store of a run that has made that many rounds after its start."""
    store = begin(RunStore("r", CONFIG, folder, 2, None if url is None else RemoteState(url, "r")))
    for _ in range(rounds + 1):
        make_recorded_round(store)
    return store


def committed(journal: Path) -> list[int]:
    """Return the rounds whose lines a journal has."""
    return [event["round"] for event in read_journal(journal).events if event["event"] == "committed"]


def said_of(folder: Path, *, rounds: int = 3, url: str | None = None, dry_run: bool = False) -> str:
    """Shorten a journal, and return what was said."""
    return "\n".join(compact(folder, run=None, url=url, rounds=rounds, dry_run=dry_run))


def test_a_shortened_journal_has_the_newest_rounds_and_leads_to_the_same_state(tmp_path: Path):
    store = run_in(tmp_path, 20)
    store.record({"event": "joined", "peer": "b", "index": 1, "instance": "y", "data": "theirs"})
    before = json.dumps(store.state.as_json())
    store.close()
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    would = said_of(tmp_path, dry_run=True)
    assert journal.read_bytes() == whole and not list(tmp_path.glob("*.gz"))
    said = said_of(tmp_path)
    size = journal.stat().st_size
    assert f"would be shortened from {len(whole)} to {size} bytes" in would
    assert f"shortened from {len(whole)} to {size} bytes; the former one is kept as" in said
    assert gzip.decompress((tmp_path / "journal.jsonl.compacted-1.gz").read_bytes()) == whole
    assert committed(journal) == [18, 19, 20] and size < len(whole) / 2
    again = RunStore("r", CONFIG, tmp_path, 2)
    assert json.dumps(again.state.as_json()) == before and again.history.counts["committed"] == 21
    assert [entry["round"] for entry in again.history.rounds] == [18, 19, 20]
    make_recorded_round(again)
    again.close()
    # Not what the next round's record tells of, nor what was left out, is missed at the next start, or the next time.
    said_of(tmp_path, rounds=1)
    assert committed(journal) == [21]
    RunStore("r", CONFIG, tmp_path, 2).close()


def test_a_journal_without_old_rounds_stays(tmp_path: Path):
    store = RunStore("r", CONFIG, tmp_path, 2)
    store.close()
    assert "nothing to compact: no round was committed" in said_of(tmp_path)
    store = begin(RunStore("r", CONFIG, tmp_path, 2))
    make_recorded_round(store)
    store.close()
    before = (tmp_path / "journal.jsonl").read_bytes()
    assert re.search(r"nothing to compact: \d+ bytes, nearly all of the newest 3 rounds", said_of(tmp_path))
    assert (tmp_path / "journal.jsonl").read_bytes() == before


def test_peers_resume_after_a_compaction_with_the_bits_that_they_would_have_had(
    make_service: MakeService,
    undisturbed: list[str],
    capsys: pytest.CaptureFixture[str],
):
    service = make_service(**DILOCO)
    service.start()
    options: dict[str, Any] = {"seed": 7, "pauses": {"3": 1.5}}
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, **options) for index in range(2)]
    until(lambda: len(service.events("committed")) == 3, "round 2")
    said_of_a_running_one = main(["server", "compact", str(service.state)])
    assert said_of_a_running_one != 0 and "uses" in capsys.readouterr().err
    assert service.server is not None
    service.server.kill()
    service.server.wait()
    assert main(["server", "compact", str(service.state), "--rounds", "1"]) == 0
    assert "shortened from" in capsys.readouterr().out
    service.start()
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    assert [event["digest"] for event in service.events("committed")] == undisturbed[2:]


def test_a_copy_is_shortened_too_also_after_an_end_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fsspec.filesystem("memory").store.clear()
    run_in(tmp_path / "one/r", 20, url=URL).close()
    journal = tmp_path / "one/r/journal.jsonl"
    whole = journal.read_bytes()

    def killed(path: Path, content: bytes) -> None:
        if path == journal:
            raise KeyboardInterrupt
        replace_file(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(compaction, "replace_file", killed)
        with pytest.raises(KeyboardInterrupt):
            said_of(tmp_path / "one/r", url=URL)
    assert journal.read_bytes() == whole and len(RemoteState(URL, "r").journal) < len(whole)
    assert "shortened from" in said_of(tmp_path / "one/r", url=URL)
    assert journal.read_bytes() == RemoteState(URL, "r").journal
    RunStore("r", CONFIG, tmp_path / "one/r", 2, RemoteState(URL, "r")).close()
    elsewhere = RunStore("r", CONFIG, tmp_path / "two/r", 2, RemoteState(URL, "r"))
    assert elsewhere.state.open_round == 21
    elsewhere.close()


def test_a_folder_that_was_shortened_alone_is_brought_together_with_its_copy(tmp_path: Path):
    fsspec.filesystem("memory").store.clear()
    run_in(tmp_path / "r", 20, url=URL).close()
    said_of(tmp_path / "r")
    assert len(RemoteState(URL, "r").journal) > len((tmp_path / "r/journal.jsonl").read_bytes())
    said_of(tmp_path / "r", rounds=7, url=URL)
    assert (tmp_path / "r/journal.jsonl").read_bytes() == RemoteState(URL, "r").journal
    RunStore("r", CONFIG, tmp_path / "r", 2, RemoteState(URL, "r")).close()


@pytest.mark.parametrize("moves", [1, 2])
def test_a_copy_of_several_parts_is_shortened_too_after_an_end_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
):
    fsspec.filesystem("memory").store.clear()
    monkeypatch.setattr(remote, "LINES", 20)
    run_in(tmp_path / "r", 20, url=URL).close()
    files, done = fsspec.filesystem("memory"), []

    def move(source: str, target: str, **options: Any) -> None:
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(source)
        type(files).mv(files, source, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files, "mv", move)
        with pytest.raises(KeyboardInterrupt):
            said_of(tmp_path / "r", url=URL)
    assert "shortened from" in said_of(tmp_path / "r", rounds=5, url=URL)
    RunStore("r", CONFIG, tmp_path / "r", 2, RemoteState(URL, "r")).close()


def test_a_start_with_a_long_journal_says_how_to_shorten_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    run_in(tmp_path, 3).close()
    assert "shorten it" not in caplog.text
    monkeypatch.setattr(store_module, "_LONG_JOURNAL", 1000)
    RunStore("r", CONFIG, tmp_path, 2).close()
    assert f"shorten it with: megatron-ext server compact {tmp_path}" in caplog.text


@pytest.mark.parametrize("rounds", [0, -1])
def test_a_journal_keeps_a_round_at_least(tmp_path: Path, rounds: int):
    with pytest.raises(UserError, match=rf"--rounds is {rounds}; it must be 1 or more"):
        said_of(tmp_path, rounds=rounds)


def test_what_cannot_be_shortened_is_refused_with_the_way_out_and_stays(tmp_path: Path):
    def refused(folder: Path, match: str, **options: Any) -> None:
        before = (folder / "journal.jsonl").read_bytes()
        with pytest.raises(UserError, match=match):
            said_of(folder, **options)
        assert (folder / "journal.jsonl").read_bytes() == before

    store = run_in(tmp_path / "made", 8)
    make_unwritten_round(store)
    store.close()
    refused(tmp_path / "made", "the newest round of its journal is 8; start the server and stop it again")
    store = begin(RunStore("r", CONFIG, tmp_path / "old", 2))
    for _ in range(8):
        make_round(store)
    store.close()
    refused(tmp_path / "old", "whose snapshots say nothing of the run; make a round with this release first")
    run_in(tmp_path / "lost", 8).close()
    lines = (tmp_path / "lost/journal.jsonl").read_bytes().splitlines(keepends=True)
    replace_file(tmp_path / "lost/journal.jsonl", b"".join(lines[:3] + lines[4:]))
    refused(tmp_path / "lost", f"has lost lines; first run: megatron-ext server recover {tmp_path / 'lost'}")
    fsspec.filesystem("memory").store.clear()
    run_in(tmp_path / "other/r", 8, url=URL).close()
    run_in(tmp_path / "r", 9).close()
    refused(tmp_path / "r", "have different histories: one of them is of another run", url=URL)
    (tmp_path / "empty/runs/r").mkdir(parents=True)
    with pytest.raises(UserError, match=r"has nothing of what is at state .*; start the server with both"):
        said_of(tmp_path / "empty", url=URL)
