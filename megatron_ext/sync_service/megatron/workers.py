# SPDX-License-Identifier: Apache-2.0
"""The workers inside a peer: the first one moves the values between the server and all of them.

A peer's rounds fall on rounds of its workers, or make them meet, so that all hold the same values. So one upload speaks
for all, and what comes back crosses the network to the server once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_ext.sync_service.megatron.slices import Slices
from megatron_ext.sync_service.peer.parts import Part, Values
from megatron_ext.worker_groups import WorkerGroups

__all__ = ["PeerValues"]


class PeerValues:
    """What a rank's client moves, and how it reaches the other workers."""

    def __init__(self, slices: Slices, groups: WorkerGroups | None) -> None:
        """Take a rank's slices.

        Args:
            slices: of its worker.
            groups: of the workers; None for a peer that is one worker.
        """
        self._slices = slices
        self._groups = groups
        self._moves = groups is None or groups.worker == 0

    @property
    def parts(self) -> list[Part]:
        """What this rank's client moves: its slices, or nothing on other workers than the first."""
        return self._slices.parts if self._moves else []

    def read(self, *, frozen: bool = True, copy: bool = False) -> Values:
        """Return the values of `parts`, see `Slices.read`."""
        return self._slices.read(frozen=frozen, copy=copy) if self._moves else {}

    def frozen(self, key: str) -> torch.Tensor | None:
        """Return the values of a part that is frozen, see `Slices.frozen`."""
        return self._slices.frozen(key)

    def write(self, values: Values) -> None:
        """Take the first worker's values, on all workers; all ranks must call it.

        Args:
            values: of `parts`.
        """
        if self._groups is None:
            self._slices.write(values)
            return
        source = dist.get_process_group_ranks(self._groups.across)[0]
        # Every worker holds the same boxes in the same order.
        device = self._slices.device
        for part in self._slices.parts:
            value = values[part.key].to(device) if self._moves else torch.empty(part.box.shape, device=device)
            value = value.contiguous()
            dist.broadcast(value, src=source, group=self._groups.across)
            self._slices.put(part.key, value)

