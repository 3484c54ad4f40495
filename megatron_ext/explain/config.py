# SPDX-License-Identifier: Apache-2.0
"""What is to be explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_ext.errors import combine

__all__ = ["ExplainConfig"]


@dataclass(frozen=True, kw_only=True)
class ExplainConfig:
    """The job whose command line is explained."""

    words: Sequence[str]
    """The command line, without the script."""

    nproc_per_node: int = 1
    """Ranks of a node, as torchrun's option of that name."""

    nnodes: int = 1
    """Nodes."""

    rank: int | None = None
    """The rank to build; None for the first rank of every pipeline stage."""

    backend: Literal["cuda", "cpu"] = "cuda"
    """Where the job will run, which decides defaults and rules."""

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""
        return self.nproc_per_node * self.nnodes

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: naming it.
        """
        problems = [
            f"{name} is {value}; give at least 1"
            for name, value in (("--nproc-per-node", self.nproc_per_node), ("--nnodes", self.nnodes))
            if value < 1
        ]
        if not problems and self.rank is not None and not 0 <= self.rank < self.world_size:
            problems.append(f"--rank is {self.rank}; the job has ranks 0 to {self.world_size - 1}")
        if problems:
            raise combine(problems, "explain")
