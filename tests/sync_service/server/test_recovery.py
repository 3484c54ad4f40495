# SPDX-License-Identifier: Apache-2.0
"""A journal that is gone, empty or cut, and snapshots that are newer: no committed round is forgotten or deleted."""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.sync_service.disk.snapshot_names import snapshot_name
from megatron_ext.sync_service.rounds.asynchronous import AsynchronousState
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.rounds.folder_lock import locked
from megatron_ext.sync_service.rounds.journal import Journal, read_journal
from megatron_ext.sync_service.rounds.round import RunState
from megatron_ext.sync_service.rounds.run_record import RunRecord
from megatron_ext.sync_service.server.store import RunStore
from megatron_ext.sync_service.shards.remote import RemoteState
from tests.support.every_run import one_of_each
from tests.support.waiting import until
from tests.sync_service.cluster import Cluster
from tests.sync_service.service import Service, Zygote
from tests.sync_service.stores import begin, make_recorded_round, make_round, make_unwritten_round, snapshot
from tests.sync_service.whole_runs import DILOCO, ROUNDS, check_history

MakeService = Callable[..., Service]
CONFIG = RunConfig(peers=2, outer_optimizer="sgd", outer_optimizer_lr=0.7)


@pytest.fixture(scope="module")
def finished(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server that was killed after the last of its rounds; it has two snapshots."""
    service = Service(zygote, tmp_path_factory.mktemp("finished"), {"demo": {"peers": 2, **DILOCO}})
    run_to_the_end(service)
    yield service
    service.stop()


def run_to_the_end(service: Service, **options: Any) -> None:
    service.start()
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, seed=7, **options) for index in range(2)]
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    end(service)


def end(service: Service) -> None:
    assert service.server is not None
    service.server.kill()
    service.server.wait()


@pytest.fixture
def service(finished: Service, make_service: MakeService) -> Service:
    """A server with a copy of that folder."""
    found = make_service(**DILOCO)
    shutil.copytree(finished.state, found.state)
    return found


def folder_of(service: Service) -> Path:
    return service.state / "runs/demo"


def contents(folder: Path) -> dict[str, bytes]:
    """Return what is in the files of a run's folder, by their paths."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rounds_in(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("round-")) for path in (folder / "snapshots").glob("*.safetensors"))


def newest_round(service: Service, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    assert main(["server", "status", "--json", "--server", service.address]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    return run["newest_round"], run["digest"]


def gone(journal: Path, chance: random.Random) -> None:
    journal.unlink()


def emptied(journal: Path, chance: random.Random) -> None:
    os.truncate(journal, 0)


def cut_at_a_line(journal: Path, chance: random.Random) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: chance.randrange(len(lines))]))


def cut_in_a_line(journal: Path, chance: random.Random) -> None:
    os.truncate(journal, chance.randrange(journal.stat().st_size))


def older_copy(journal: Path, chance: random.Random) -> None:
    """What a copy has that was made before the last round, and a server that was started with it has continued."""
    lines = journal.read_bytes().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if b'"committed"' in line)
    journal.write_bytes(b"".join(lines[: chance.randrange(2, last - 1)]))
    found = Journal(journal)
    found.append({"event": "started"})
    found.close()


def without_its_last_round(journal: Path, chance: random.Random) -> None:
    """What is left when the line that commits the newest round, and what may follow it, is lost."""
    lines = journal.read_bytes().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if b'"committed"' in line)
    torn = lines[last][: chance.randrange(len(lines[last]))]
    journal.write_bytes(b"".join(lines[:last]) + torn)


LOSSES = [gone, emptied, cut_at_a_line, cut_in_a_line, older_copy, without_its_last_round]
DRAWN = [cut_at_a_line, cut_in_a_line, older_copy, without_its_last_round]
TRIALS = [
    *((lose, 0) for lose in LOSSES),
    *((lose, seed) for lose in DRAWN for seed in (1, 2)),
    *(pytest.param(lose, seed, marks=pytest.mark.slow) for lose in DRAWN for seed in range(3, 12)),
]


@pytest.mark.parametrize(("lose", "seed"), TRIALS)
def test_whatever_is_lost_of_a_journal_the_server_keeps_its_newest_round_or_refuses_to_start_and_changes_nothing(
    service: Service,
    undisturbed: list[str],
    capsys: pytest.CaptureFixture[str],
    lose: Callable[[Path, random.Random], None],
    seed: int,
):
    folder = folder_of(service)
    lose(folder / "journal.jsonl", random.Random(seed))
    before = contents(folder)
    server = service.start()
    if server.exit_code is not None:
        assert server.exit_code == 2 and "Traceback" not in service.output
        (said,) = (line for line in service.output.splitlines() if "error:" in line)
        for word in (str(folder), snapshot_name(ROUNDS), "journal", f"megatron-ext server recover {folder}"):
            assert word in said
        assert contents(folder) == before
        assert main(["server", "recover", str(service.state)]) == 0
        said = capsys.readouterr().out
        assert f"run demo: recovered at round {ROUNDS}, whose digest is {undisturbed[ROUNDS]}" in said
        service.start()
    assert newest_round(service, capsys) == (ROUNDS, undisturbed[ROUNDS])
    assert rounds_in(folder) == [ROUNDS - 1, ROUNDS]


def test_a_journal_cut_anywhere_is_explained_again_by_the_newest_snapshot(finished: Service, tmp_path: Path):
    content = (folder_of(finished) / "journal.jsonl").read_bytes()
    ends = [0]
    for line in content.splitlines(keepends=True):
        ends += [ends[-1] + len(line) // 2, ends[-1] + len(line)]
    refused = 0
    for number, size in enumerate(ends):
        folder = tmp_path / str(number)
        shutil.copytree(folder_of(finished), folder)
        os.truncate(folder / "journal.jsonl", size)
        before = contents(folder)
        try:
            store = RunStore("demo", CONFIG, folder, 2)
        except UserError:
            refused += 1
            assert contents(folder) == before
            assert main(["server", "recover", str(folder)]) == 0
            store = RunStore("demo", CONFIG, folder, 2)
        store.close()
        assert sorted(store.shard.snapshots) == rounds_in(folder) == [ROUNDS - 1, ROUNDS]
        # By index: which of the two registered first is chance.
        assert {member.index: member.name for member in store.state.members.values()} == {0: "p0", 1: "p1"}
    assert 0 < refused < len(ends)


@pytest.fixture(scope="module")
def usual(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """Return by codec what peers see whose server loses nothing."""
    found = {}
    for codec in ("fp32", "int8"):
        service = Service(zygote, tmp_path_factory.mktemp(codec), {"demo": {"peers": 2, **DILOCO}})
        run_to_the_end(service, codec=codec)
        found[codec] = digests_seen(service)
    yield found


def digests_seen(service: Service) -> list[str]:
    found = [[seen["digest"] for seen in service.seen(f"p{index}").values()] for index in range(2)]
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("lose", LOSSES)
@pytest.mark.parametrize("codec", one_of_each(["fp32", "int8"], {1}))
def test_peers_resume_at_a_recovered_server_with_the_bits_that_they_would_have_had(
    make_service: MakeService, usual: dict[str, list[str]], lose: Callable[[Path, random.Random], None], codec: str
):
    service = make_service(**DILOCO)
    service.start()
    options: dict[str, Any] = {"seed": 7, "codec": codec, "pauses": {"3": 1.5}}
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, **options) for index in range(2)]
    until(lambda: len(service.events("committed")) == 3, "round 2")
    end(service)
    lose(folder_of(service) / "journal.jsonl", random.Random(1))
    if service.start().exit_code is not None:
        assert main(["server", "recover", str(service.state)]) == 0
        service.start()
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    assert digests_seen(service) == usual[codec]
    rounds = [event["round"] for event in service.events("committed")]
    assert rounds == sorted(set(rounds)) and rounds[-1] == ROUNDS


def test_a_round_whose_line_was_lost_is_committed_once_with_all_that_it_counts(service: Service):
    journal = folder_of(service) / "journal.jsonl"
    whole = service.journal()
    without_its_last_round(journal, random.Random(0))
    service.start()
    again = service.journal()

    def told(event: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in event.items() if key not in ("time", "crc")}

    assert list(map(told, again[: len(whole)])) == list(map(told, whole))
    check_history(service, ROUNDS)


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


def kinds(line: bytes) -> tuple[str, int | None]:
    event = json.loads(line)
    return event["event"], event.get("round")


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


def refused_recovery(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    capsys.readouterr()
    before = contents(folder)
    assert main(["server", "recover", str(folder), *flags]) == 2
    after = contents(folder)
    assert {**after, "lock": b""} == {**before, "lock": b""}
    return capsys.readouterr().err


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


def test_a_contribution_that_is_asked_for_once_more_leaves_the_round_open_whose_snapshot_is_there(service: Service):
    folder = folder_of(service)
    without_its_last_round(folder / "journal.jsonl", random.Random(0))
    journal = Journal(folder / "journal.jsonl")
    journal.append({"event": "forgotten", "round": ROUNDS, "peer": "p0", "reason": "it is damaged"})
    journal.close()
    (folder / f"spool/round-{ROUNDS + 1:08d}").rename(folder / f"spool/round-{ROUNDS:08d}")
    service.start()
    assert [event["round"] for event in service.events("committed")] == list(range(ROUNDS))
    assert rounds_in(folder) == [ROUNDS - 2, ROUNDS - 1, ROUNDS][-len(rounds_in(folder)) :]
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, seed=7) for index in range(2)]
    assert [peer.wait() for peer in peers] == [0, 0]
    check_history(service, ROUNDS)


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


# What is at a URL.


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


def test_a_server_killed_before_the_line_of_a_round_commits_it_at_its_next_start(
    make_service: MakeService,
    undisturbed: list[str],
):
    service = make_service(**DILOCO)
    server = service.start("snapshot_renamed:3")
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, seed=7) for index in range(2)]
    assert server.wait() == -signal.SIGKILL
    assert len(service.events("committed")) == 2
    made = (folder_of(service) / "snapshots" / snapshot_name(2)).read_bytes()
    service.start()
    assert [event["digest"] for event in service.events("committed")] == undisturbed[:3]
    assert (folder_of(service) / "snapshots" / snapshot_name(2)).read_bytes() == made
    assert [peer.wait() for peer in peers] == [0, 0]
    assert [event["digest"] for event in service.events("committed")] == undisturbed
