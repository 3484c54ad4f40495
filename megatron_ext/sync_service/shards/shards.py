# SPDX-License-Identifier: Apache-2.0
"""All shards of a run together: what the first server has itself, and what others have.

A round is committed by the first server's journal when every shard has its part of the values on the disk, and no shard
takes it for the newest one before it was told of that line. So a round is committed on all of them or on none. The
first server's part has its name last: where it has, all are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from megatron_ext.outer.codecs.all_codecs import CODECS
from megatron_ext.sync_service.protocol.round_digest import RoundDigest
from megatron_ext.sync_service.shards.remote_shard import RemoteShard
from megatron_ext.sync_service.shards.shard import RoundJob, Shard
from megatron_ext.sync_service.values.decision import Decision, Measured
from megatron_ext.sync_service.values.guards import Judged
from megatron_ext.sync_service.values.reduction import Made

__all__ = ["Shards"]

_T = TypeVar("_T")


class Shards:
    """Makes rounds on all shards at once."""

    def __init__(self, here: Shard, others: Sequence[RemoteShard] = ()) -> None:
        """Take the shard of this process, and those of others."""
        self.others = tuple(others)
        self._here = here
        self._pool = ThreadPoolExecutor(len(self.others)) if self.others else None

    @property
    def problem(self) -> str:
        """Which shards do not go along, and why; empty when all do."""
        return "; ".join(shard.problem for shard in self.others if shard.problem)

    @property
    def is_refused(self) -> bool:
        """Whether one does not because it belongs to something else, which waiting does not fix."""
        return any(shard.problem and shard.is_refused for shard in self.others)

    def lacking(self, codec: str) -> str:
        """Say which shards, which are here, lack a codec, or have another than this server; empty when none does."""
        kind = codec.partition(":")[0]
        wanted = CODECS.package_of(kind) or ""
        found = [(shard, shard.codecs.get(kind)) for shard in self.others]
        return "; ".join(
            f"shard {shard.number} at {shard.address} has "
            + (f"no codec {kind!r}" if package is None else f"codec {kind!r} from {package or 'megatron_ext'}")
            + f", the first server from {wanted or 'megatron_ext'}; install the same on all servers"
            for shard, package in found
            if package != wanted
        )

    @property
    def spooled(self) -> dict[str, int]:
        """Bytes of the contributions to the open round, by peer."""
        found = self._here.spool.nbytes
        for shard in self.others:
            for peer, nbytes in shard.spooled.items():
                found[peer] = found.get(peer, 0) + nbytes
        return found

    def seal(self, peer: str, instance: str, index: int, number: int) -> tuple[str | None, int, int]:
        """Make what others have of a contribution durable.

        Returns:
            What it lacks, None when it is whole; its frames and bytes.

        Raises:
            ShardProblem: a shard does not do it.
        """
        if self._pool is None:
            return None, 0, 0
        found = list(self._pool.map(lambda shard: shard.seal(peer, instance, index, number), self.others))
        lacking = [missing for missing, _, _ in found if missing is not None]
        return (lacking or [None])[0], sum(frames for _, frames, _ in found), sum(nbytes for _, _, nbytes in found)

    def measure(self, job: RoundJob) -> list[Measured]:
        """See `Shard.measure`."""
        found = self._all(lambda shard: shard.measure(job))
        return [_together(parts) for parts in zip(*found, strict=True)]

    def common_squares(self, job: RoundJob, decision: Decision) -> dict[Judged, float]:
        """See `Shard.common_squares`."""
        found = self._all(lambda shard: shard.common_squares(job, decision))
        return {key: square for squares in found for key, square in squares.items()}

    def write(self, job: RoundJob, decision: Decision) -> Made:
        """See `Shard.write`; when this returns every shard has its part on the disk, other shards under its name."""
        found = self._all(lambda shard: shard.write(job, decision))
        stepped = [made.outer_scalars for made in found if made.outer_scalars != job.outer_scalars]
        return Made(
            sums=RoundDigest(made.sums for made in found).sums,
            # A shard without any tensor that was stepped has the old ones still.
            outer_scalars=stepped[0] if stepped else dict(job.outer_scalars),
        )

    def stop(self) -> None:
        """End the threads."""
        for shard in self.others:
            shard.stop()
        if self._pool is not None:
            self._pool.shutdown()

    def _all(self, work: Callable[[Shard | RemoteShard], _T]) -> list[_T]:
        """Return what all shards do, which have all come to an end, however it was."""
        if self._pool is None:
            return [work(self._here)]
        others = [self._pool.submit(work, shard) for shard in self.others]
        try:
            here = work(self._here)
        finally:
            wait(others)
        return [here, *(other.result() for other in others)]


def _together(parts: Sequence[Measured]) -> Measured:
    """Return what is known of a contribution whose parts are on several shards; each unit is on one."""
    return Measured(
        squares={key: square for part in parts for key, square in part.squares.items()},
        unusable=next((part.unusable for part in parts if part.unusable is not None), None),
        nbytes=sum(part.nbytes for part in parts),
    )
