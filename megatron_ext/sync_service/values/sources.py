# SPDX-License-Identifier: Apache-2.0
"""What a round is made of: the last round's values and the contributions, read from the disk block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_ext.sync_service.disk.snapshot import CheckedRead, Snapshot
from megatron_ext.sync_service.protocol.catalog import TensorSpec
from megatron_ext.sync_service.protocol.frames import codec_of
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.values.blocks import Block, common_blocks
from megatron_ext.sync_service.values.contribution import Contribution
from megatron_ext.sync_service.values.reused_memory import ReusedMemory

__all__ = ["Contributor", "DamagedContribution", "Sources"]


class DamagedContribution(Exception):
    """A contribution cannot be read any more; its peer has to upload it again."""

    def __init__(self, peer: str, problem: str) -> None:
        super().__init__(f"the contribution of peer {peer!r} is damaged on the server's disk: {problem}")
        self.peer = peer
        self.problem = problem


@dataclass(frozen=True, kw_only=True)
class Contributor:
    """A peer whose contribution was in when the round closed."""

    peer: str
    """Its name."""

    index: int
    """Its place among the peers."""

    contribution: Contribution
    """What it has uploaded."""


class Sources:
    """Reads values and contributions. What a thread gets is overwritten when it reads the next block of its kind."""

    def __init__(self, codec: str, before: Snapshot | None, *, absolute: bool, by_blocks: bool) -> None:
        """Prepare.

        Args:
            codec: of the contributions.
            before: the last round; None at the start.
            absolute: whether contributions are values, not pseudo-gradients.
            by_blocks: whether a round can be made of a tensor block by block.
        """
        self.before = before
        self.absolute = absolute
        self._by_blocks = by_blocks
        self._multiple = codec_of(codec).grid
        self._memory = ReusedMemory()

    def give_up(self) -> None:
        """Give up what this thread has got: fresh memory comes with the next block."""
        self._memory.give_up()

    def blocks(self, spec: TensorSpec, contributors: Sequence[Contributor]) -> list[Block]:
        """Return the blocks of a tensor that these contributions have in common."""
        if not self._by_blocks:
            return [(0, spec.numel)]
        ranges = [contributor.contribution.ranges(spec) for contributor in contributors]
        return common_blocks(spec.numel, ranges, self._multiple)

    def checked(self, name: str) -> CheckedRead | None:
        """Return what reads a tensor or state of the last round; None where it has none."""
        return None if self.before is None or name not in self.before else self.before.checked(name)

    def anchor(self, reader: CheckedRead | None, at: Block) -> torch.Tensor | None:
        """Return the last round's values of a block; None at the start.

        Raises:
            OSError: they are damaged on the disk.
        """
        return None if reader is None else reader.read(*at, out=self._memory("anchor", at[1]))

    def uploaded(self, spec: TensorSpec, contributor: Contributor, at: Block) -> torch.Tensor:
        """Return what a peer has uploaded of a block.

        Raises:
            DamagedContribution: it cannot be read.
        """
        try:
            return contributor.contribution.read(spec, at, self._memory("uploaded", at[1]))
        except (Refusal, OSError) as error:
            raise DamagedContribution(contributor.peer, str(error)) from error

    def gradient(self, anchor: torch.Tensor | None, uploaded: torch.Tensor) -> torch.Tensor:
        """Return the pseudo-gradient that was uploaded; at the start the values."""
        if anchor is None or not self.absolute:
            return uploaded
        return torch.sub(anchor, uploaded, out=self._memory("gradient", uploaded.numel()))

    def values(self, anchor: torch.Tensor | None, uploaded: torch.Tensor) -> torch.Tensor:
        """Return the values that were uploaded."""
        if anchor is None or self.absolute:
            return uploaded
        return torch.sub(anchor, uploaded, out=self._memory("values", uploaded.numel()))

    def gradients(self, spec: TensorSpec, contributor: Contributor) -> Iterator[torch.Tensor]:
        """Yield a peer's pseudo-gradient of a tensor, block by block; at the start its values.

        Raises:
            DamagedContribution: it cannot be read.
        """
        reader = self.checked(spec.name)
        for at in self.blocks(spec, [contributor]):
            yield self.gradient(self.anchor(reader, at), self.uploaded(spec, contributor, at))
