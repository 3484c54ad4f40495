# SPDX-License-Identifier: Apache-2.0
"""Copies of what shards have, at a URL: any machine may be lost, and nothing is lost that was committed."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.errors import UserError
from megatron_ext.sync_service.disk.snapshot_names import snapshot_name
from megatron_ext.sync_service.shards.remote_shard_copy import ShardCopy
from tests.support.every_run import one_of_each
from tests.sync_service.cluster import Cluster
from tests.sync_service.service import Service
from tests.sync_service.stores import snapshot
from tests.sync_service.whole_runs import ROUNDS

MakeService = Callable[..., Service]


@pytest.mark.parametrize(
    ("victim", "failpoint", "lost"),
    one_of_each(
        [
            (1, "snapshot_renamed:3", [1]),
            (2, "upload_checked:3", [2]),
            (0, "round_committed:3", [0]),
            (0, "snapshot_renamed:3", [0, 1, 2]),
            (0, "round_committed:3", [0, 1, 2]),
        ],
        {1, 2, 3},
    ),
)
def test_peers_resume_at_other_machines(
    make_service: MakeService,
    undisturbed: list[str],
    victim: int,
    failpoint: str,
    lost: list[int],
):
    service = make_service(outer_optimizer="sgd", outer_optimizer_lr=0.7)
    cluster = Cluster(service, 3, state=f"file://{service.folder}/bucket")
    cluster.start_all({victim: failpoint})
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, seed=7) for index in range(2)]
    assert cluster.servers[victim].wait() == -signal.SIGKILL
    for number in lost:
        cluster.servers[number].kill()
        cluster.servers[number].wait()
        shutil.rmtree(service.state / (f"shard-{number}" if number else "runs"))
    for number in reversed(lost):
        cluster.start(number)
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    assert cluster.digests("demo") == undisturbed
    for number in (1, 2):
        copied = {path.name for path in (service.folder / f"bucket/demo/shard-{number}/snapshots").iterdir()}
        here = {path.name for path in (service.state / f"shard-{number}/runs/demo/snapshots").iterdir()}
        # The first server says it when a round is over, and the last one's word may not have come.
        assert snapshot_name(ROUNDS) in copied and here <= copied


def shard_folder(path: Path, *rounds: int, run: str = "one") -> Path:
    """Return a shard's folder with values of some rounds."""
    (path / "snapshots").mkdir(parents=True)
    (path / "shard.json").write_text(run)
    for number in rounds:
        snapshot(path / "snapshots" / snapshot_name(number)).close()
    return path


def rounds_in(path: Path) -> list[int]:
    names = (entry.stem for entry in (path / "snapshots").glob("*.safetensors"))
    return sorted(int(name.removeprefix("round-")) for name in names)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket"


def test_the_folder_that_wrote_last_is_right(tmp_path: Path, url: str):
    first = shard_folder(tmp_path / "first", 1, 2)
    ShardCopy(url, "r", 1).meet(first)
    assert rounds_in(tmp_path / "bucket/r/shard-1") == [1, 2]
    # What the same folder has made since, while nobody else wrote, is right; so is what it has dropped.
    snapshot(first / "snapshots" / snapshot_name(3)).close()
    (first / "snapshots" / snapshot_name(1)).unlink()
    again = ShardCopy(url, "r", 1)
    again.meet(first)
    second = tmp_path / "second"
    newer = ShardCopy(url, "r", 1)
    newer.meet(second)
    assert rounds_in(second) == [1, 2, 3] and (second / "shard.json").read_text() == "one"
    with pytest.raises(OSError, match="nothing that this server does counts any more"):
        again.put_snapshot(first / "snapshots" / snapshot_name(3))
    # Another machine made the same round, after this one had been lost while it made it.
    written = snapshot(second / "snapshots" / snapshot_name(4))
    written.close()
    newer.put_snapshot(written.path)
    (first / "snapshots" / snapshot_name(4)).write_bytes(b"never committed")
    ShardCopy(url, "r", 1).meet(first)
    assert (first / "snapshots" / snapshot_name(4)).read_bytes() == written.path.read_bytes()


def test_newer_values_are_never_replaced_by_older_ones(tmp_path: Path, url: str):
    ShardCopy(url, "r", 1).meet(shard_folder(tmp_path / "first", 1, 2))
    other = shard_folder(tmp_path / "other", 3, 4)
    with pytest.raises(UserError, match=r"has no values after round-00000002.safetensors, but .* round-00000004"):
        ShardCopy(url, "r", 1).meet(other)
    assert rounds_in(other) == [3, 4]
    ShardCopy(url, "r", 1).meet(tmp_path / "first")


def test_a_copy_of_another_run_is_refused(tmp_path: Path, url: str):
    ShardCopy(url, "r", 1).meet(shard_folder(tmp_path / "first", 1))
    with pytest.raises(UserError, match="has values of another run or shard than"):
        ShardCopy(url, "r", 1).meet(shard_folder(tmp_path / "other", 1, run="two"))


def test_a_start_that_did_not_get_to_its_end_takes_the_copy_from_nobody(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
):
    def away(*_: object) -> None:
        raise OSError("the store is away for a moment")

    folder = shard_folder(tmp_path / "one", 4)
    ShardCopy(url, "r", 1).meet(folder)
    # Made, and never copied.
    snapshot(folder / "snapshots" / snapshot_name(5)).close()
    monkeypatch.setattr(ShardCopy, "put_snapshot", away)
    for _ in range(2):
        with pytest.raises(UserError, match="away for a moment"):
            ShardCopy(url, "r", 1).meet(folder)
    monkeypatch.undo()
    ShardCopy(url, "r", 1).meet(folder)
    assert rounds_in(tmp_path / "bucket/r/shard-1") == [4, 5]
