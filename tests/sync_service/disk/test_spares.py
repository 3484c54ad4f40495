# SPDX-License-Identifier: Apache-2.0
"""Files that are written over show nothing of what was in them, whoever still reads them."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from megatron_ext.sync_service.disk import spares as spares_module
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.disk.snapshot_writer import SnapshotWriter
from megatron_ext.sync_service.disk.spares import SpareFiles
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.frames import Frame, cut, whole_box
from megatron_ext.sync_service.values.contribution import Contribution, Discarded
from megatron_ext.sync_service.values.spool import Spool

SPEC = TensorSpec(name="w", shape=(64, 64))
CATALOG = Catalog([SPEC])


def frames(value: float) -> list[Frame]:
    values = torch.full((SPEC.numel,), value)
    return [
        Frame.make("w", SPEC.shape, whole_box(SPEC.shape), at, values[at : at + count])
        for at, count in cut(SPEC.numel, 4096)
    ]


def fill(contribution: Contribution, value: float, count: int | None = None) -> Contribution:
    for frame in frames(value)[:count]:
        contribution.append(frame)
    return contribution


def spool(folder: Path, most: int = 2) -> Spool:
    return Spool(folder / "spool", SpareFiles(folder / "spare", most))


@pytest.fixture
def leases(tmp_path: Path) -> None:
    """Skip where files are not written over: nothing tells there who else reads them."""
    file = tmp_path / "leased"
    file.touch()
    if not spares_module._is_unshared(file):
        pytest.skip("the file system or the kernel knows no leases")
    file.unlink()


@pytest.mark.usefixtures("leases")
def test_a_contribution_is_written_over_a_former_one(tmp_path: Path):
    used = spool(tmp_path)
    fill(used.contribution("p", 1, CATALOG, "fp32"), 1.0)
    (file,) = (tmp_path / "spool").glob("*/*")
    inode = file.stat().st_ino
    used.open_round(2)
    again = fill(used.contribution("q", 2, CATALOG, "fp32"), 2.0)
    (file,) = (tmp_path / "spool").glob("*/*")
    assert file.stat().st_ino == inode and not list((tmp_path / "spare").iterdir())
    assert torch.equal(again.read(SPEC), torch.full((SPEC.numel,), 2.0))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_restarted_server_takes_no_frame_of_a_former_round_for_one_of_this(tmp_path: Path, count: int):
    used = spool(tmp_path)
    # The same tensors in frames of the same sizes: they end where those of the next round do.
    fill(used.contribution("p", 1, CATALOG, "fp32"), 1.0)
    used.open_round(2)
    fill(used.contribution("p", 2, CATALOG, "fp32"), 2.0, count)
    found = spool(tmp_path).contribution("p", 2, CATALOG, "fp32")
    assert found.frames == count and (found.missing(None) or "").startswith(f"{1024 * count} of the 4096 elements")
    fill(found, 3.0 if count == 0 else 2.0)
    assert torch.equal(found.read(SPEC), torch.full((SPEC.numel,), 3.0 if count == 0 else 2.0))
    assert spool(tmp_path).contribution("p", 2, CATALOG, "fp32").missing(None) is None


def test_who_reads_a_contribution_that_is_over_reads_what_was_in_it(tmp_path: Path):
    used = spool(tmp_path)
    first = fill(used.contribution("p", 1, CATALOG, "fp32"), 1.0)
    sent = first.frames_of("w", whole_box(SPEC.shape))
    assert sent is not None
    got = [next(sent)]
    used.open_round(2)
    fill(used.contribution("p", 2, CATALOG, "fp32"), 2.0)
    assert removed_files_open() == 1
    got += sent
    assert len(got) == 4 and all(torch.equal(frame.values(), torch.ones(1024)) for frame in got)
    assert removed_files_open() == 0
    with pytest.raises(Discarded):
        first.read(SPEC)


def removed_files_open() -> int:
    """Return how many contributions that are removed this process has open."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(link.endswith(".frames (deleted)") for link in links)


def written(folder: Path, number: int, value: float, spares: SpareFiles) -> Snapshot:
    writer = SnapshotWriter(folder / f"round-{number}.safetensors", CATALOG, [], {}, spares=spares)
    writer.write("w", torch.full((SPEC.numel,), value))
    writer.sync()
    writer.publish()
    return Snapshot(folder / f"round-{number}.safetensors")


def test_who_reads_a_snapshot_that_is_removed_reads_what_was_in_it(tmp_path: Path):
    spares = SpareFiles(tmp_path / "spare", 1)
    first = written(tmp_path, 0, 1.0, spares)
    with first.reading():
        first.remove(spares)
        written(tmp_path, 1, 2.0, spares)
        assert torch.equal(first.read("w"), torch.ones(SPEC.numel))
    assert [path.name for path in tmp_path.iterdir()] == ["round-1.safetensors"]


def test_a_snapshot_over_a_longer_one_is_no_longer_than_it_should_be(tmp_path: Path):
    spares = SpareFiles(tmp_path / "spare", 1)
    (tmp_path / "old").write_bytes(b"x" * 100_000)
    spares.keep(tmp_path / "old")
    found = written(tmp_path, 0, 1.0, spares)
    assert not list((tmp_path / "spare").iterdir())
    assert found.path.stat().st_size < 20_000
    assert torch.equal(found.checked("w").read(0, SPEC.numel), torch.ones(SPEC.numel))


@pytest.mark.parametrize("holder", ["link", "mapping", "handle"])
def test_who_holds_a_snapshot_from_outside_keeps_what_was_in_it(tmp_path: Path, holder: str):
    spares = SpareFiles(tmp_path / "spare", 1)
    first = written(tmp_path, 0, 1.0, spares)
    if holder == "link":
        os.link(first.path, tmp_path / "kept")
    with first.path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        held = os.dup(file.fileno())
    if holder != "mapping":
        mapped.close()
    if holder != "handle":
        os.close(held)
    before = first.path.read_bytes()
    first.remove(spares)
    written(tmp_path, 1, 2.0, spares)
    if holder == "link":
        assert (tmp_path / "kept").read_bytes() == before
    elif holder == "mapping":
        assert mapped[:] == before
        mapped.close()
    else:
        assert os.pread(held, len(before), 0) == before
        os.close(held)


def test_a_file_that_cannot_be_kept_is_removed(tmp_path: Path):
    spares = SpareFiles(tmp_path / "spare", 1)
    (tmp_path / "spare").write_text("a file where the folder should be, as good as a full disk")
    (tmp_path / "old").write_text("old")
    spares.keep(tmp_path / "old")
    assert not (tmp_path / "old").exists()
    spares.take(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_file_that_is_far_longer_than_its_frames_is_not_kept(tmp_path: Path):
    used = spool(tmp_path)
    fill(used.contribution("p", 1, CATALOG, "fp32"), 1.0)
    used.open_round(2)
    used.contribution("p", 2, CATALOG, "fp32").append(frames(2.0)[0])
    used.open_round(3)
    used.contribution("p", 3, CATALOG, "fp32").append(frames(3.0)[0])
    (path,) = (tmp_path / "spool" / "round-00000003").iterdir()
    assert path.stat().st_size < 2 * 4096


@pytest.mark.usefixtures("leases")
def test_no_more_are_kept_than_wanted_and_none_after_a_restart(tmp_path: Path):
    spares = SpareFiles(tmp_path / "spare", 1)
    for name in "ab":
        (tmp_path / name).write_text(name)
        spares.keep(tmp_path / name)
    assert len(list((tmp_path / "spare").iterdir())) == 1 and not (tmp_path / "b").exists()
    SpareFiles(tmp_path / "spare", 1).take(tmp_path / "c")
    assert not (tmp_path / "c").exists() and not (tmp_path / "spare").exists()
