# SPDX-License-Identifier: Apache-2.0
"""`server recover`: journals that lack lines, or have damaged ones, are rebuilt from the newest snapshot."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.sync_service.server.store import RunStore
from tests.support.waiting import until
from tests.sync_service.cluster import Cluster
from tests.sync_service.server.recovery.lost_journals import (
    CONFIG,
    contents,
    end,
    folder_of,
    kinds,
    newest_round,
    refused_recovery,
)
from tests.sync_service.service import Service
from tests.sync_service.stores import begin, make_round
from tests.sync_service.whole_runs import DILOCO, ROUNDS

MakeService = Callable[..., Service]


def test_recovering_says_what_it_finds_keeps_the_old_journal_and_does_nothing_twice(
    service: Service,
    undisturbed: list[str],
    capsys: pytest.CaptureFixture[str],
):
    folder = folder_of(service)
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:4]))
    before = contents(service.state)
    assert main(["server", "recover", str(service.state), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"recovered at round {ROUNDS}, whose digest is {undisturbed[ROUNDS]}" in said
    assert "p0 (index 0), p1 (index 1)" in said and "nothing was changed" in said
    assert contents(service.state) == before
    assert main(["server", "recover", str(service.state), "--run", "demo"]) == 0
    assert (folder / "journal.jsonl.lost-1").read_bytes() == b"".join(lines[:4])
    assert journal.read_bytes().startswith(b"".join(lines[:4]))
    after = contents(service.state)
    assert main(["server", "recover", str(folder)]) == 0
    assert "nothing to recover" in capsys.readouterr().out and contents(service.state) == after
    # Lost a second time: the first copy is not overwritten.
    os.truncate(journal, 0)
    assert main(["server", "recover", str(folder)]) == 0
    assert (folder / "journal.jsonl.lost-1").read_bytes() == b"".join(lines[:4])
    assert (folder / "journal.jsonl.lost-2").read_bytes() == b""


def test_a_journal_that_is_damaged_in_the_middle_can_be_rebuilt(
    service: Service,
    undisturbed: list[str],
    capsys: pytest.CaptureFixture[str],
):
    journal = folder_of(service) / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:5], lines[5].replace(b'"event"', b'"avent"'), *lines[6:]]))
    assert service.start().wait() == 2
    assert f"line 6 is damaged (of {len(lines)})" in service.output and "server recover" in service.output
    assert main(["server", "recover", str(service.state)]) == 0
    service.start()
    assert newest_round(service, capsys) == (ROUNDS, undisturbed[ROUNDS])


# Whole lines that are missing at the head of the journal or in its middle; all others are as they were.
MISSING: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "the tensors": lambda lines: [line for line in lines if kinds(line)[0] != "created"],
    "a member": lambda lines: [line for line in lines if not (kinds(line)[0] == "joined" and b'"p1"' in line)],
    "the first": lambda lines: lines[1:],
    "the first ten": lambda lines: lines[10:],
    "a round": lambda lines: [line for line in lines if kinds(line) != ("committed", 2)],
    "an upload": lambda lines: [
        line for number, line in enumerate(lines) if number != list(map(kinds, lines)).index(("uploaded", 2))
    ],
    "the first and the last": lambda lines: lines[3:-3],
}


@pytest.mark.parametrize("what", MISSING)
def test_a_journal_that_lacks_whole_lines_is_refused_and_can_be_rebuilt(
    service: Service,
    undisturbed: list[str],
    capsys: pytest.CaptureFixture[str],
    what: str,
):
    folder = folder_of(service)
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    left = MISSING[what](lines)
    assert len(left) < len(lines)
    journal.write_bytes(b"".join(left))
    before = contents(folder)
    assert service.start().wait() == 2
    assert "Traceback" not in service.output and "nothing was changed" in service.output
    assert f"megatron-ext server recover {folder}" in service.output
    assert contents(folder) == before
    assert main(["server", "recover", str(service.state)]) == 0
    assert f"recovered at round {ROUNDS}" in capsys.readouterr().out
    service.start()
    assert newest_round(service, capsys) == (ROUNDS, undisturbed[ROUNDS])
    end(service)
    assert service.start().exit_code is None  # a rebuilt journal is taken again


def test_a_journal_of_a_release_without_records_that_lacks_whole_lines_is_refused_in_one_line(tmp_path: Path):
    store = RunStore("demo", CONFIG, tmp_path, 2)
    make_round(begin(store))
    store.close()
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if kinds(line)[0] != "joined"))
    with pytest.raises(UserError, match=r"lacks lines before 'uploaded' of peer 'a' in round 0 .*server recover"):
        RunStore("demo", CONFIG, tmp_path, 2)


def test_the_journal_of_several_servers_is_rebuilt_from_the_first_one_s_snapshot(
    make_service: MakeService,
    undisturbed: list[str],
):
    service = make_service(**DILOCO)
    cluster = Cluster(service, 3)
    cluster.start_all()
    peers = [
        service.peer(f"p{index}", ROUNDS, options={"index": index}, seed=7, pauses={"3": 3.0}) for index in range(2)
    ]
    until(lambda: len(service.events("committed")) == 3, "round 2")
    cluster.servers[0].kill()
    cluster.servers[0].wait()
    (folder_of(service) / "journal.jsonl").unlink()
    assert cluster.start(0).wait() == 2
    assert main(["server", "recover", str(service.state)]) == 0
    cluster.start(0)
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    assert cluster.digests("demo") == undisturbed[2:]
    assert service.seen("p0")[ROUNDS]["digest"] == service.seen("p1")[ROUNDS]["digest"] == undisturbed[ROUNDS]


def test_a_shard_s_folder_has_no_journal_to_recover_and_is_not_taken_over_without_its_identity(
    make_service: MakeService, capsys: pytest.CaptureFixture[str]
):
    service = make_service(**DILOCO)
    cluster = Cluster(service, 2)
    cluster.start_all()
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, seed=7) for index in range(2)]
    assert [peer.wait() for peer in peers] == [0, 0]
    cluster.servers[1].kill()
    cluster.servers[1].wait()
    said = refused_recovery(service.state / "shard-1", capsys)
    assert "has the values of a shard, whose journal is at the first server" in said
    identity = service.state / "shard-1/runs/demo/shard.json"
    content = identity.read_text()
    identity.unlink()
    before = contents(identity.parent)
    cluster.start(1)
    until(lambda: f"write {content} into it" in cluster.servers[0].output, "the first server's complaint")
    assert contents(identity.parent) == before
    identity.write_text(content)
    until(lambda: cluster.servers[0].output.rstrip().endswith("is here"), "the shard's values")
