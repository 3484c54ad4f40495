# SPDX-License-Identifier: Apache-2.0
"""What cannot be recovered, or does not belong to the run: it is refused with the way out, and kept."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.sync_service.disk.snapshot_names import snapshot_name
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.rounds.folder_lock import locked
from megatron_ext.sync_service.rounds.journal import Journal
from megatron_ext.sync_service.server.store import RunStore
from tests.sync_service.server.recovery.lost_journals import (
    contents,
    end,
    folder_of,
    newest_round,
    refused_recovery,
    run_to_the_end,
    without_its_last_round,
)
from tests.sync_service.service import Service
from tests.sync_service.stores import begin, make_round
from tests.sync_service.whole_runs import ROUNDS

MakeService = Callable[..., Service]


def test_a_journal_that_is_damaged_before_any_round_is_refused_in_one_line(
    make_service: MakeService, capsys: pytest.CaptureFixture[str]
):
    service = make_service(peers=2)
    folder_of(service).mkdir(parents=True)
    journal = Journal(folder_of(service) / "journal.jsonl")
    for peer in "abc":
        journal.append({"event": "left", "peer": peer})
    journal.close()
    lines = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(b"".join([lines[0], b"{}\n", lines[2]]))
    before = contents(folder_of(service))
    said = refused_recovery(service.state, capsys)
    assert "line 2 is damaged (of 3), and no round was committed before it" in said and len(said.splitlines()) == 1
    assert contents(folder_of(service)) == before


def test_a_damaged_snapshot_of_a_round_that_the_journal_commits_is_not_to_be_moved_out(
    service: Service, capsys: pytest.CaptureFixture[str]
):
    path = folder_of(service) / "snapshots" / snapshot_name(ROUNDS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3000] + b"damage" + whole[-2994:])
    for command in ("recover", "compact"):
        assert main(["server", command, str(service.state)]) == 2
        said = capsys.readouterr().err
        assert f"{path} is damaged, and the journal commits its round; restore the file from a copy" in said
        assert "move it out" not in said and len(said.splitlines()) == 1
    path.unlink()
    assert main(["server", "compact", str(service.state)]) == 2
    assert f"{path} is not there, and the journal commits its round" in capsys.readouterr().err


def test_what_cannot_be_recovered_is_refused_with_the_way_out(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = folder_of(service)
    (folder / "journal.jsonl").unlink()
    with locked(service.state):
        assert "another server uses it; stop that one" in refused_recovery(service.state, capsys)
    assert "has no run 'other'" in refused_recovery(service.state, capsys, "--run", "other")
    assert "is not a server's folder" in refused_recovery(tmp_path, capsys)
    path = folder / "snapshots" / snapshot_name(ROUNDS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3000] + b"damage" + whole[-2994:])
    said = refused_recovery(service.state, capsys)
    assert f"{path} is damaged" in said and "restore the file from a copy, or move it out" in said
    os.truncate(path, 1000)
    assert f"{path} is damaged" in refused_recovery(service.state, capsys)
    # The way out: that round is given up.
    path.rename(tmp_path / path.name)
    made = folder / f"spool/round-{ROUNDS + 1:08d}"
    assert made.is_dir()
    said = refused_recovery(service.state, capsys)
    assert f"spool/{made.name}, so that round {ROUNDS} had been committed" in said and "move that folder out" in said
    made.rename(tmp_path / made.name)
    assert main(["server", "recover", str(service.state)]) == 0
    assert f"recovered at round {ROUNDS - 1}" in capsys.readouterr().out
    service.start()
    assert newest_round(service, capsys)[0] == ROUNDS - 1
    end(service)
    (folder / "snapshots" / snapshot_name(ROUNDS - 1)).unlink()
    assert "the values are lost; restore the snapshot from a copy" in refused_recovery(service.state, capsys)


def test_snapshots_of_a_release_without_records_are_refused_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    store = begin(RunStore("r", RunConfig(peers=1), tmp_path, 2))
    for _ in range(3):
        make_round(store)
    store.close()
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    for size in (0, 2, len(lines) - 4, len(lines) - 1):
        journal.write_bytes(b"".join(lines[:size]))
        before = contents(tmp_path)
        with pytest.raises(UserError, match=r"has the snapshots round-00000001.*, but .*: the journal has lost lines"):
            RunStore("r", RunConfig(peers=1), tmp_path, 2)
        assert contents(tmp_path) == before
        said = refused_recovery(tmp_path, capsys)
        assert "of a release of megatron_ext whose snapshots say nothing of the run" in said
    # As it was killed between the snapshot and the line, by what that release left: the round is made again.
    (tmp_path / "spool/round-00000003").rename(tmp_path / "spool/round-00000002")
    (tmp_path / "spool/round-00000002/a.0000000000000001.frames").touch()
    assert RunStore("r", RunConfig(peers=1), tmp_path, 2).state.open_round == 2


def test_a_start_removes_nothing_that_the_journal_does_not_name(service: Service):
    folder = folder_of(service)
    others = ["snapshots/notes.txt", "snapshots/round-00000003.safetensors.bak", "snapshots/round-final.safetensors"]
    others += ["spool/notes.txt", "spool/round-00000004/stranger.0000000000000001.frames", "spool/old/a.frames"]
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"somebody's")
    (folder / "snapshots/round-00000004.partial").write_bytes(b"half")
    service.start()
    assert all((folder / name).read_bytes() == b"somebody's" for name in others)
    assert not (folder / "snapshots/round-00000004.partial").exists()


def test_contributions_to_a_round_that_the_journal_does_not_know_are_refused_and_kept(service: Service):
    folder = folder_of(service)
    path = folder / f"spool/round-{ROUNDS + 2:08d}/p0.0000000000000001.frames"
    path.parent.mkdir()
    path.write_bytes(b"contributed")
    before = contents(folder)
    assert service.start().wait() == 2
    said = f"has contributions to round {ROUNDS + 2}, but the newest round of journal.jsonl is {ROUNDS}"
    assert said in service.output
    assert contents(folder) == before


def test_an_empty_folder_for_contributions_is_not_taken_for_contributions(service: Service):
    folder = folder_of(service)
    shutil.rmtree(folder / "spool")
    (folder / f"spool/round-{ROUNDS + 1:08d}").mkdir(parents=True)  # as the server leaves it after the last round
    (folder / "journal.jsonl").unlink()
    assert service.start().wait() == 2
    assert "has the snapshots round-" in service.output and "rebuild it from the newest snapshot" in service.output
    assert "contributions to round" not in service.output and "empty folder" not in service.output


@pytest.mark.parametrize("contributed", [True, False])
def test_without_journal_and_snapshots_nobody_is_sent_to_recover(
    service: Service, capsys: pytest.CaptureFixture[str], contributed: bool
):
    folder = folder_of(service)
    (folder / "journal.jsonl").unlink()
    for name in ("snapshots", "spool"):
        shutil.rmtree(folder / name)
    path = folder / f"spool/round-{ROUNDS + 1:08d}"
    path.mkdir(parents=True)
    found = f"the empty folder spool/{path.name}, made when round {ROUNDS} was committed"
    if contributed:
        (path / "p0.0000000000000001.frames").write_bytes(b"contributed")
        found = f"contributions to round {ROUNDS + 1}"
    before = contents(folder)
    assert service.start().wait() == 2
    for said in (service.output, refused_recovery(service.state, capsys)):
        assert f"has {found}, but there is no journal.jsonl: the journal has lost lines" in said
        assert "no snapshot that it could be rebuilt from, so restore journal.jsonl and the snapshots" in said
        assert "server recover" not in said
    assert contents(folder) == before


@pytest.mark.parametrize("what", ["damaged", "cut"])
def test_a_damaged_snapshot_of_the_open_round_is_refused_and_kept(service: Service, what: str):
    folder = folder_of(service)
    without_its_last_round(folder / "journal.jsonl", random.Random(0))
    path = folder / "snapshots" / snapshot_name(ROUNDS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3000] + b"damage" + whole[-2994:] if what == "damaged" else whole[:1000])
    before = contents(folder)
    assert service.start().wait() == 2
    assert f"{path} is damaged, and the journal does not say whether its round was committed" in service.output
    assert contents(folder) == before


def test_a_snapshot_of_another_run_in_the_place_of_a_round_s_own_is_refused(
    service: Service, make_service: MakeService, capsys: pytest.CaptureFixture[str]
):
    other = make_service(peers=2)
    run_to_the_end(other)
    name = f"snapshots/{snapshot_name(ROUNDS)}"
    shutil.copy(folder_of(other) / name, folder_of(service) / name)
    assert service.start().wait() == 2
    assert "one of them is of another run, or of another copy of this one; restore the one" in service.output
    # And the journal of another run: both would count, were it cut.
    lines = (folder_of(service) / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (folder_of(service) / "journal.jsonl").write_bytes(b"".join(lines[:-4]))
    assert service.start().wait() == 2
    assert "the journal has lost lines" in service.output
