# SPDX-License-Identifier: Apache-2.0
"""The process groups of workers, as the seams make them and features use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["InstanceGroups", "WorkerGroups"]


@dataclass(frozen=True, kw_only=True)
class InstanceGroups:
    """The groups of this rank's optimizer instance (`--num-distributed-optimizer-instances`) inside its worker.

    An instance has all of the optimizer's state, sharded over its ranks. With one instance it is the worker.
    """

    dp_cp: Any
    """Data and context parallel inside the instance."""

    expert_dp: Any
    """Expert data parallel inside the instance."""

    whole: Any
    """All ranks of the instance."""

    across: Any
    """The ranks of the worker that hold the same shard, one per instance; None with one instance."""

    dp_cp_gloo: Any
    """Gloo twin of `dp_cp`, None when gloo groups are off."""

    expert_dp_gloo: Any
    """Gloo twin of `expert_dp`, None when gloo groups are off."""


@dataclass(frozen=True, kw_only=True)
class WorkerGroups:
    """The groups of this rank's worker, and the group across workers; `dist.ProcessGroup` throughout."""

    num_workers: int
    """W."""

    worker: int
    """Index of this rank's worker, 0 to W - 1."""

    across: Any
    """The W ranks that hold the same shard, one per worker, in worker order."""

    inside: Any
    """All ranks of this worker."""

    dp: Any
    """Data parallel inside the worker."""

    dp_cp: Any
    """Data and context parallel inside the worker."""

    expert_dp: Any
    """Expert data parallel inside the worker."""

    tp_dp: Any
    """Tensor and data parallel inside the worker."""

    tp_dp_cp: Any
    """Tensor, data and context parallel inside the worker."""

    dp_gloo: Any
    """Gloo twin of `dp`, None when gloo groups are off."""

    dp_cp_gloo: Any
    """Gloo twin of `dp_cp`, None when gloo groups are off."""

    expert_dp_gloo: Any
    """Gloo twin of `expert_dp`, None when gloo groups are off."""

    instance: InstanceGroups
    """This rank's optimizer instance inside the worker."""
