# SPDX-License-Identifier: Apache-2.0
"""Whether a server's disk has room for a run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.frames import codec_of
from megatron_ext.sync_service.protocol.limits import gib
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.values.tensor_round import TensorRound
from megatron_ext.sync_service.values.updates import kept_as

__all__ = ["bytes_of_round", "check_room"]


def check_room(folder: Path, config: RunConfig, catalog: Catalog, codec: str, keep_snapshots: int) -> None:
    """Check that a round fits on the disk, unless the run is not to.

    Args:
        folder: on that disk.
        config: of the run.
        catalog: the tensors that this server has.
        codec: of contributions.
        keep_snapshots: how many committed rounds stay on the disk.

    Raises:
        Refusal: it does not.
    """
    if not config.check_disk:
        return
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    needed = bytes_of_round(config, catalog, codec, keep_snapshots)
    if needed > free:
        raise Refusal(
            "state",
            f"a round of the announced tensors ({gib(catalog.nbytes)} in fp32) needs {gib(needed)} of the server's "
            f"disk, and {gib(free)} are free in {folder}; give the server another dir, or the run check_disk: false",
        )


def bytes_of_round(config: RunConfig, catalog: Catalog, codec: str, keep_snapshots: int) -> int:
    """Return what must be on the disk when a round has been made: contributions of a quorum, and snapshots."""
    uploaded = sum(codec_of(codec).nbytes(spec.numel) * _fewest_uploads(config, spec) for spec in catalog)
    return uploaded + (keep_snapshots + 1) * _snapshot_bytes(config, catalog, codec)


def _fewest_uploads(config: RunConfig, spec: TensorSpec) -> int:
    """Return how many contributions to a round have a tensor at least."""
    quorum = config.policy.quorum
    return max(quorum - (config.peers - len(spec.owners)), 0) if spec.owners else quorum


def _snapshot_bytes(config: RunConfig, catalog: Catalog, codec: str) -> int:
    """Return the bytes of a snapshot's values and of the states that belong to them."""
    per_step = config.contributions_of_step
    tensors = TensorRound(
        config.outer, codec=codec, before=None, outer_scalars={}, per_step=per_step, merged=frozenset()
    )
    stepped = _numel(spec for spec in catalog if not spec.owners)
    total = catalog.nbytes + 4 * len(tensors.states) * stepped
    if codec != "fp32":
        total += (kept_as(codec).itemsize + 4) * _numel(catalog)  # the update, and what it has lost
    return total


def _numel(specs: Iterable[TensorSpec]) -> int:
    return sum(spec.numel for spec in specs)
