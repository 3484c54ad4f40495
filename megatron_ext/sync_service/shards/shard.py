# SPDX-License-Identifier: Apache-2.0
"""The values of a run that a server process has: what was uploaded of them, their snapshots, how rounds change them.

    FOLDER/snapshots/round-N.safetensors       the values of the newest rounds
    FOLDER/spool/round-N/PEER.SALT.frames      contributions to the open round
    FOLDER/spare                               files to write over

It keeps no account of rounds: its user says which one is open, and what was decided about it. A round may be made
again and again until it is committed, with the same bits: `write` makes its values, `publish` gives them their name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megatron_ext.errors import UserError
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.disk.snapshot_names import newest_of, snapshot_name, snapshot_number
from megatron_ext.sync_service.disk.snapshot_writer import SnapshotWriter
from megatron_ext.sync_service.disk.spares import SpareFiles
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.frames import codec_of
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.values.contribution import Contribution
from megatron_ext.sync_service.values.decision import Decision, Measured
from megatron_ext.sync_service.values.failpoints import Failpoints
from megatron_ext.sync_service.values.guards import Judged
from megatron_ext.sync_service.values.merge import Merge
from megatron_ext.sync_service.values.open_values import OpenValues
from megatron_ext.sync_service.values.reduction import Contributor, DamagedContribution, Made, Reduction
from megatron_ext.sync_service.values.spool import Spool

__all__ = ["RoundJob", "Shard", "Uploader"]

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Uploader:
    """A peer whose contribution was in when the round closed."""

    peer: str
    """Its name."""

    index: int
    """Its place among the peers."""

    made_for: int
    """The round that its contribution was made for."""


@dataclass(frozen=True, kw_only=True)
class RoundJob:
    """A round that is to be made."""

    number: int
    """Which one."""

    uploaders: tuple[Uploader, ...]
    """Of whose contributions, in the order of their indices."""

    outer_scalars: dict[str, float]
    """Of the last round."""

    record_bytes: int = 0
    """About how long the record in the snapshot will be; no other shard has one."""


class Shard:
    """Values on the disk. Rounds are made by one thread at a time."""

    def __init__(self, config: RunConfig, folder: Path, keep_snapshots: int, failpoints: Failpoints) -> None:
        """Open the folder.

        Args:
            config: of the run.
            folder: where the values are; made when it is not there.
            keep_snapshots: how many committed rounds stay on the disk.
            failpoints: where to die in tests.
        """
        # A contribution of every peer, and the snapshot that is no longer kept when the next one has been made.
        spares = SpareFiles(folder / "spare" / "frames", config.peers)
        self.spool = Spool(folder / "spool", spares, config.limits)
        self._spares = SpareFiles(folder / "spare" / "snapshots", 1)
        self.snapshots: dict[int, Snapshot] = {}
        self._config = config
        self._keep = keep_snapshots
        self._failpoints = failpoints
        self._folder = folder / "snapshots"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._catalog: Catalog | None = None
        self._codec = ""
        self._sources: tuple[int, dict[str, bytes]] = (-1, {})
        self._attempt: tuple[RoundJob, SnapshotWriter, Made] | None = None
        self._unpublished: tuple[RoundJob, SnapshotWriter, dict[str, bytes]] | None = None
        self._reading = threading.Lock()

    def open(self, catalog: Catalog, codec: str) -> None:
        """Say which tensors there are, and how contributions travel."""
        self._catalog, self._codec = catalog, codec

    @property
    def is_open(self) -> bool:
        """Whether the tensors are known."""
        return self._catalog is not None

    @property
    def catalog(self) -> Catalog:
        """The tensors, which have to be known."""
        assert self._catalog is not None
        return self._catalog

    @property
    def codec(self) -> str:
        """In which contributions travel."""
        return self._codec

    @property
    def result_codec(self) -> str:
        """In which updates travel."""
        return codec_of(self._codec).for_results(self._config.peers).name

    def recover(self, open_round: int) -> None:
        """Find the snapshots that a former process has left, and remove those that are older than what is kept.

        That of the open round stays as well, which may be about to be committed, and so do files that are not
        snapshots.

        Args:
            open_round: the round that is not committed yet.

        Raises:
            UserError: the newest round's is not there, or not what was written, or an older one cannot be read.
        """
        first = max(0, open_round - self._keep)
        for number in range(first, open_round):
            # Older ones may be gone: fewer were kept.
            if self.snapshot_path(number).exists() or number == open_round - 1:
                self.snapshots[number] = Snapshot(self.snapshot_path(number))
        if open_round - 1 in self.snapshots:
            self._check(self.snapshots[open_round - 1])
        # Only now: a request for a round that is not here must not have the others removed.
        for path in list(self._folder.iterdir()):
            found = snapshot_number(path.with_suffix(".safetensors").name)
            is_unfinished = path.suffix == ".partial"
            if found is not None and (is_unfinished or (path.suffix == ".safetensors" and found < first)):
                path.unlink()

    def _check(self, newest: Snapshot) -> None:
        """Read the values that peers continue from, and the next round is made of.

        Raises:
            UserError: they are not what was written. It would be noticed later, too, but by peers that end for it.
        """
        lacking = [spec.name for spec in self._catalog or () if spec.name not in newest]
        if lacking:
            raise UserError(f"{newest.path}: lacks tensor {lacking[0]!r}; restore the file from a copy")
        try:
            newest.check()
        except OSError as error:
            raise UserError(str(error)) from error

    @property
    def newest_file(self) -> int:
        """The newest round that there is a snapshot of, committed or not; -1 without any."""
        return newest_of(path.name for path in self._folder.iterdir())

    def snapshot_path(self, number: int) -> Path:
        """Return where the snapshot of a round is."""
        return self._folder / snapshot_name(number)

    def committed(self, number: int, snapshot: Snapshot | None = None) -> None:
        """Take a round's values for the newest ones, and remove old ones.

        Args:
            number: the round, which was made here.
            snapshot: its values, if they have been opened.
        """
        self.snapshots[number] = Snapshot(self.snapshot_path(number)) if snapshot is None else snapshot
        if self._sources[0] == number:
            self.snapshots[number].sources = self._sources[1]
        for old in [old for old in self.snapshots if old <= number - self._keep]:
            self.snapshots.pop(old).remove(self._spares)

    def contribution(self, peer: str, number: int) -> Contribution:
        """Return a peer's contribution to a round, perhaps an empty one."""
        # All peers start from it: nothing of it may be lost.
        codec = "fp32" if number == 0 else self._codec
        return self.spool.contribution(peer, number, self.catalog, codec)

    def missing(self, contribution: Contribution, index: int, number: int) -> str | None:
        """Return in words what a contribution to a round lacks; None when it is whole."""
        return contribution.missing(None if number == 0 else index)

    def open_values(self, number: int) -> OpenValues:
        """Return what is known of the values of a round, above 0, that is not made yet."""
        merge = self.merge(number)
        return OpenValues(
            self.catalog,
            self._codec,
            sent=lambda spec: self.spool.sent_alone(number, spec),
            merged=frozenset() if merge is None else merge.names,
            reading=self._reading,
        )

    def measure(self, job: RoundJob) -> list[Measured]:
        """Return what the decision about a round needs, in the order of its uploaders.

        Where only non-finite contributions are left out, nearly always all count: the values are made at the same
        time, and `write` finds them made if that is what was decided.

        Raises:
            DamagedContribution: one cannot be read, and was removed.
            OSError: the values cannot be written.
        """
        self._take_attempt()
        is_judged = self._config.judges(self.catalog) or self._config.max_norm is not None
        if is_judged and job.number > 0:
            return self._made(job, lambda reduction, contributors: reduction.measure(contributors))
        path = self.snapshot_path(job.number)
        measured, made = self._made(job, lambda reduction, contributors: reduction.attempt(path, contributors))
        if made is not None:
            self._attempt = job, *made
        return measured

    def common_squares(self, job: RoundJob, decision: Decision) -> dict[Judged, float]:
        """Return the squared norms of the common pseudo-gradients of the units that all peers train.

        Raises:
            DamagedContribution: one cannot be read, and was removed.
        """
        return self._made(job, lambda reduction, contributors: reduction.common_squares(contributors, decision))

    def write(self, job: RoundJob, decision: Decision) -> Made:
        """Make a round's values; when this returns they are durable, and have not their name yet.

        Raises:
            DamagedContribution: one cannot be read, and was removed.
            OSError: they cannot be written.
        """

        def write(reduction: Reduction, contributors: list[Contributor]) -> Made:
            found = self._take_attempt(job, decision)
            writer, made = found or reduction.write(self.snapshot_path(job.number), contributors, decision)
            self._failpoints.hit("snapshot_written")
            identities = {entry.peer: entry.contribution.identity for entry in contributors}
            sources = {name: identities[peer] for name, peer in made.as_uploaded.items()}
            self._unpublished = job, writer, sources
            return made

        return self._made(job, write)

    def publish(self, record: bytes = b"") -> None:
        """Give the values that were written last their name, under which they are durable when this returns.

        Args:
            record: the snapshot's record of the run; none when empty.

        Raises:
            OSError: they cannot be written; nothing of them is left.
        """
        assert self._unpublished is not None
        (job, writer, sources), self._unpublished = self._unpublished, None
        try:
            writer.publish(record)
        except BaseException:  # whatever it is, no half snapshot stays
            writer.abandon()
            raise
        self._failpoints.hit("snapshot_renamed")
        self._sources = job.number, sources

    def _take_attempt(
        self, job: RoundJob | None = None, decision: Decision | None = None
    ) -> tuple[SnapshotWriter, Made] | None:
        """Return the values that were made with the measuring if they are this round's, else remove them."""
        if self._unpublished is not None:
            # Another shard has not made its part.
            self._unpublished[1].abandon()
            self._unpublished = None
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return None
        made_for, writer, made = attempt
        if made_for == job and decision is not None and decision.is_plain:
            return writer, made
        writer.abandon()
        return None

    def merge(self, number: int) -> Merge | None:
        """Return what a round merges, None for nothing."""
        return Merge.of_round(self._config.merging, self.catalog, self._config.merge_step(number))

    def _made(self, job: RoundJob, work: Callable[[Reduction, list[Contributor]], _T]) -> _T:
        reduction = Reduction(
            self.catalog,
            self._config.outer,
            codec=self._codec,
            result_codec=self.result_codec,
            reducing=self._config.reducing,
            before=self.snapshots[job.number - 1] if job.number > 0 else None,
            outer_scalars=job.outer_scalars,
            failpoints=self._failpoints,
            per_step=self._config.contributions_of_step if job.number > 0 else None,
            merge=self.merge(job.number),
            spares=self._spares,
            record_bytes=job.record_bytes,
            number=job.number,
        )
        try:
            return work(reduction, [self._contributor(uploader) for uploader in job.uploaders])
        except DamagedContribution as damaged:
            self.spool.discard(damaged.peer)
            raise

    def _contributor(self, uploader: Uploader) -> Contributor:
        contribution = self.contribution(uploader.peer, uploader.made_for)
        missing = self.missing(contribution, uploader.index, uploader.made_for)
        if missing is not None:
            raise DamagedContribution(uploader.peer, missing)
        return Contributor(peer=uploader.peer, index=uploader.index, contribution=contribution)
