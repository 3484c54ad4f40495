# SPDX-License-Identifier: Apache-2.0
"""Journal, spool and snapshots: what a killed server leaves behind is read back, and nothing more is believed."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron_ext.errors import UserError
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.disk.snapshot_writer import SnapshotWriter
from megatron_ext.sync_service.protocol.frames import Box, Frame, cut, whole_box
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.rounds.journal import Journal
from megatron_ext.sync_service.server.store import RunStore
from megatron_ext.sync_service.values.contribution import Contribution, Discarded
from megatron_ext.sync_service.values.spool import Spool
from tests.sync_service.stores import CATALOG, VALUES, begin, make_round, snapshot

reused_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)


def frames_of(values: dict[str, torch.Tensor]) -> list[Frame]:
    found = []
    for spec in CATALOG:
        flat, box = values[spec.name].reshape(-1), whole_box(spec.shape)
        found += [Frame.make(spec.name, spec.shape, box, at, flat[at : at + n]) for at, n in cut(spec.numel, 1024)]
    return found


def written_journal(path: Path) -> list[dict]:
    path.unlink(missing_ok=True)
    journal = Journal(path)
    events = [journal.append({"event": "uploaded", "round": number, "peer": "p", "norm": 0.1}) for number in range(5)]
    journal.close()
    return events


def test_a_journal_says_what_was_written(tmp_path: Path):
    events = written_journal(tmp_path / "journal.jsonl")
    assert Journal(tmp_path / "journal.jsonl").events == events


@reused_folder
@given(keep=st.floats(0, 1))
def test_a_journal_that_ends_in_a_half_line_loses_that_line_and_resumes(tmp_path: Path, keep: float):
    path = tmp_path / "journal.jsonl"
    events = written_journal(path)
    data = path.read_bytes()[: int(keep * path.stat().st_size)]
    path.write_bytes(data)
    journal = Journal(path)
    whole = data.count(b"\n")
    assert journal.events == events[:whole]
    journal.append({"event": "started"})
    journal.close()
    assert [event["event"] for event in Journal(path).events] == ["uploaded"] * whole + ["started"]


def test_a_last_line_whose_beginning_never_reached_the_disk_is_dropped(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    events = written_journal(path)
    *lines, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + bytes(20) + last[20:])
    assert Journal(path).events == events[:4]
    assert path.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("number", [3, 5], ids=["in the middle", "the last one"])
def test_a_damaged_line_of_a_journal_is_refused_and_nothing_is_dropped(tmp_path: Path, number: int):
    path = tmp_path / "journal.jsonl"
    written_journal(path)
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 5
    lines[number - 1] = lines[number - 1].replace('"round": ', '"round": 1')
    path.write_text("".join(lines))
    with pytest.raises(UserError, match=rf"journal.jsonl: line {number} is damaged"):
        Journal(path)
    assert path.read_text() == "".join(lines)


@reused_folder
@given(st.data())
def test_frames_in_any_order_and_any_number_of_times_make_the_same_contribution(tmp_path: Path, data: st.DataObject):
    contribution = Contribution(tmp_path / "p.frames", CATALOG, "fp32")
    frames = frames_of(VALUES)
    order = data.draw(st.permutations(frames + data.draw(st.lists(st.sampled_from(frames)))))
    assert sum(contribution.append(frame) for frame in order) == len(frames)
    assert contribution.missing(0) is None
    for spec in CATALOG:
        assert torch.equal(contribution.read(spec), VALUES[spec.name].view(-1))
    contribution.discard()


@reused_folder
@given(keep=st.floats(0, 1))
def test_a_spool_cut_anywhere_keeps_its_whole_frames_and_can_be_finished(tmp_path: Path, keep: float):
    path = tmp_path / "p.frames"
    path.unlink(missing_ok=True)
    frames = frames_of(VALUES)
    first = Contribution(path, CATALOG, "fp32")
    for frame in frames:
        first.append(frame)
    path.write_bytes(path.read_bytes()[: int(keep * first.nbytes)])
    found = Contribution(path, CATALOG, "fp32")
    assert found.nbytes == path.stat().st_size <= int(keep * first.nbytes)
    kept = found.frames
    assert [found.append(frame) for frame in frames] == [False] * kept + [True] * (len(frames) - kept)
    assert found.missing(0) is None and torch.equal(found.read(CATALOG["a"]), VALUES["a"].view(-1))


def test_a_spool_damaged_on_the_disk_is_noticed_when_it_is_read(tmp_path: Path):
    contribution = Contribution(tmp_path / "p.frames", CATALOG, "fp32")
    for frame in frames_of(VALUES):
        contribution.append(frame)
    data = bytearray((tmp_path / "p.frames").read_bytes())
    data[len(data) // 2] ^= 1
    with (tmp_path / "p.frames").open("r+b") as file:
        file.write(data)
    with pytest.raises(Refusal) as caught:
        for spec in CATALOG:
            contribution.read(spec)
    assert caught.value.reason == "damaged"


def test_boxes_of_different_ranks_make_one_tensor(tmp_path: Path):
    contribution = Contribution(tmp_path / "p.frames", CATALOG, "fp32")
    for box in (Box((0, 0), (30, 15)), Box((10, 15), (20, 25)), Box((0, 15), (10, 25))):
        part = VALUES["a"][box.slices].reshape(-1)
        for offset, count in cut(box.numel, 512):
            contribution.append(Frame.make("a", (30, 40), box, offset, part[offset : offset + count]))
    assert torch.equal(contribution.read(CATALOG["a"]), VALUES["a"].view(-1))


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_what_was_not_coded_is_zero_in_memory_that_was_used_before(tmp_path: Path, codec: str):
    contribution = Contribution(tmp_path / "p.frames", CATALOG, codec)
    ones = torch.ones(512)
    for offset, count in cut(1200, 2048):
        part = ones[:count] if offset == 512 else torch.zeros(count)
        contribution.append(Frame.make("a", (30, 40), whole_box((30, 40)), offset, part, codec))
    expected = torch.zeros(1200)
    expected[512:1024] = 1
    for again in (contribution, Contribution(tmp_path / "p.frames", CATALOG, codec)):
        found = again.read(CATALOG["a"], out=torch.full((2000,), 9.0))
        assert torch.allclose(found, expected, rtol=0, atol=0.01) and not found[expected == 0].any()
    assert contribution.nbytes < 2 * 4 * 512


def test_what_contradicts_or_does_not_belong_is_refused_and_changes_nothing(tmp_path: Path):
    contribution = Contribution(tmp_path / "p.frames", CATALOG, "fp32")
    first = frames_of(VALUES)[0]
    contribution.append(first)
    size = contribution.nbytes
    box = whole_box((30, 40))
    for frame, problem in (
        (Frame.make("a", (30, 40), box, 0, torch.zeros(first.count)), "differs from the one that has arrived before"),
        (Frame.make("a", (30, 40), box, 1, torch.zeros(4)), "overlaps"),
        (Frame.make("a", (40, 30), whole_box((40, 30)), 0, torch.zeros(4)), r"shape of tensor 'a' is \(40, 30\)"),
        (Frame.make("d", (4,), whole_box((4,)), 0, torch.zeros(4)), "tensor 'd' is not in the catalog"),
        (Frame.make("c", (7,), whole_box((7,)), 0, torch.zeros(7), "bf16"), "codec of a frame is 'bf16'"),
    ):
        with pytest.raises(Refusal, match=problem):
            contribution.append(frame)
    assert contribution.nbytes == size == (tmp_path / "p.frames").stat().st_size
    assert contribution.missing(0) == "256 of the 1200 elements of tensor 'a' have arrived"


def test_a_discarded_contribution_takes_no_more_frames_and_its_successor_starts_empty(tmp_path: Path):
    spool = Spool(tmp_path)
    spool.open_round(1)
    old = spool.contribution("p", 1, CATALOG, "fp32")
    old.append(frames_of(VALUES)[0])
    spool.discard("p")
    with pytest.raises(Discarded):
        old.append(frames_of(VALUES)[1])
    assert spool.contribution("p", 1, CATALOG, "fp32").frames == 0
    spool.open_round(2)
    assert [path.name for path in tmp_path.iterdir()] == ["round-00000002"]


def test_a_snapshot_is_a_safetensors_file(tmp_path: Path):
    snapshot(tmp_path / "s.safetensors")
    content = load_file(tmp_path / "s.safetensors")
    assert set(content) == {*VALUES, *(f"outer:momentum_buffer:{name}" for name in VALUES)}
    assert all(torch.equal(content[name], value) for name, value in VALUES.items())
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]


def test_a_flipped_bit_anywhere_in_a_snapshot_is_found(tmp_path: Path):
    path = tmp_path / "s.safetensors"
    snapshot(path, record=b"what is said of the run")
    whole = path.read_bytes()
    dice = random.Random(1)
    head = 8 + int.from_bytes(whole[:8], "little")
    unseen = []
    for at in (*range(head), *(dice.randrange(head, len(whole)) for _ in range(200))):
        path.write_bytes(whole[:at] + bytes((whole[at] ^ 1 << dice.randrange(8),)) + whole[at + 1 :])
        try:
            Snapshot(path).check()
        except (UserError, OSError):
            continue
        unseen.append(at)
    # By the key of the head's own checksum alone it is not found that this is lacking: all else is as it was.
    key = whole.index(b'"head_crc32": "')
    assert set(unseen) <= set(range(key, key + len(b'"head_crc32": "')))


def test_a_snapshot_of_a_release_whose_heads_had_no_checksum_is_read(tmp_path: Path):
    path = tmp_path / "s.safetensors"
    snapshot(path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"head_crc32"', b'"some_other"', 1))
    assert torch.equal(Snapshot(path).read("c"), VALUES["c"])


def test_any_part_of_a_snapshot_can_be_read(tmp_path: Path):
    found = snapshot(tmp_path / "s.safetensors")
    assert torch.equal(found.read("a", 100, 33), VALUES["a"].view(-1)[100:133])
    assert torch.equal(found.read("outer:momentum_buffer:c"), 2 * VALUES["c"])
    box, flat = Box((3, 5), (4, 6)), VALUES["a"][3:7, 5:11].reshape(-1)
    assert torch.equal(found.read_box("a", box), flat)
    for offset, count in ((0, 6), (1, 4), (4, 5), (5, 19), (23, 1)):
        assert torch.equal(found.read_box("a", box, offset, count), flat[offset : offset + count])


@pytest.mark.parametrize("room", [0, 100, 1000])
def test_a_record_of_any_length_comes_back_and_leaves_a_safetensors_file(tmp_path: Path, room: int):
    for length in (0, 1, 127, 128, 129, 5000):
        path, record = tmp_path / f"{length}.safetensors", b"r" * length
        writer = SnapshotWriter(path, CATALOG, [], {"round": "7"}, record_bytes=room)
        for name, value in VALUES.items():
            writer.write(name, value)
        writer.sync()
        writer.publish(record)
        found, content = Snapshot(path), load_file(path)
        found.check()
        assert found.record == record
        assert all(torch.equal(content[name], value) for name, value in VALUES.items())
        assert {name for name in content if name.startswith("outer:")} <= {"outer:record", "outer:record.rest"}
        # Where there is room, what comes last is values.
        assert ("outer:record.rest" in content) == (length > -(-room // 64) * 64)


@reused_folder
@given(keep=st.floats(0, 0.999))
def test_a_snapshot_that_was_cut_is_refused_with_its_name(tmp_path: Path, keep: float):
    path = tmp_path / "s.safetensors"
    path.unlink(missing_ok=True)
    snapshot(path)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with pytest.raises(UserError, match=r"s.safetensors: cannot be read as a snapshot"):
        Snapshot(path)


def test_a_snapshot_that_lacks_a_tensor_never_gets_its_name(tmp_path: Path):
    writer = SnapshotWriter(tmp_path / "s.safetensors", CATALOG, [], {})
    writer.write("a", VALUES["a"])
    with pytest.raises(ValueError, match="'b' was not written"):
        writer.sync()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_restored_run_awaits_all_its_members_again(tmp_path: Path):
    config = RunConfig(peers=2, quorum=1)
    store = RunStore("r", config, tmp_path, 2)
    store.create({"codec": "fp32"}, CATALOG)
    for index, peer in enumerate(("a", "b")):
        store.record({"event": "joined", "peer": peer, "index": index, "instance": peer})
    for number in (0, 1):
        store.record({"event": "uploaded", "round": number, "peer": "a"})
        store.record(store.state.closing_event())
        event = {"event": "committed", "round": number, "digest": "", "contributors": ["a"], "rejected": {}}
        figures = {"outer_scalars": {}, "norms": {}, "bytes": 0, "seconds": 0.0}
        store.commit({**event, **figures}, snapshot(store.shard.snapshot_path(number)))
    assert store.state.awaited() == ["a"]
    store.close()
    restored = RunStore("r", config, tmp_path, 2)
    # Whether b has taken the values of round 1 since is not in the journal.
    assert restored.state.open_round == 2 and restored.state.awaited() == ["a", "b"]
    assert sorted(restored.shard.snapshots) == [0, 1]


def test_a_restored_asynchronous_run_keeps_what_may_still_count(tmp_path: Path):
    config = RunConfig(peers=3, rounds="asynchronous")
    store = RunStore("r", config, tmp_path, 2)
    store.create({"codec": "fp32"}, CATALOG)
    figures = {"digest": "", "rejected": {}, "outer_scalars": {}, "norms": {}, "bytes": 0, "seconds": 0.0}
    for index, peer in enumerate(("a", "b", "c")):
        store.record({"event": "joined", "peer": peer, "index": index, "instance": peer})

    def upload(peer: str, number: int, frames: list[Frame]) -> None:
        for frame in frames:
            store.shard.contribution(peer, number).append(frame)

    for number in (0, 1):
        upload("a", number, frames_of(VALUES))
        store.record({"event": "uploaded", "round": number, "peer": "a"})
        store.record(store.state.closing_event())
        if number == 0:
            committed = {"event": "committed", "round": 0, "contributors": ["a"], **figures}
            store.commit(committed, snapshot(store.shard.snapshot_path(0)))
    upload("b", 1, frames_of(VALUES))
    store.record({"event": "uploaded", "round": 1, "peer": "b"})
    upload("c", 1, frames_of(VALUES)[:2])
    # The server dies when the round is committed, and before anything is removed of what it was made of.
    snapshot(store.shard.snapshot_path(1))
    store.record({"event": "committed", "round": 1, "contributors": ["a"], **figures})
    store.close()
    restored = RunStore("r", config, tmp_path, 2)
    left = sorted(path.name for path in (tmp_path / "spool").glob("round-*/*"))
    assert [name.partition(".")[0] for name in left] == ["b", "c"] and list(restored.state.uploaded) == ["b"]
    assert restored.shard.contribution("c", 1).frames == 2


def test_a_round_is_there_also_when_what_it_does_not_need_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    store = begin(RunStore("r", RunConfig(peers=1), tmp_path / "r", 2))
    monkeypatch.setattr(Spool, "open_round", full)
    make_round(store)
    assert store.state.open_round == 1 and list(store.shard.snapshots) == [0]
    assert "what round 0 does not need stays for now: [Errno 28]" in caplog.text
