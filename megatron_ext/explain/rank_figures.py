# SPDX-License-Identifier: Apache-2.0
"""What is said about a job and its ranks; all of it goes into the JSON as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["JobFigures", "MemoryUse", "RankFigures", "SavedPart", "TrafficUse"]


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Memory of a rank with one cause."""

    cause: str
    """What it is for."""

    nbytes: int
    """Bytes."""

    place: Literal["device", "host"] = "device"
    """Whose memory it is."""

    by_formula: bool = False
    """Whether it comes from a formula of docs/explain.md; else tensors that Megatron made were counted."""


@dataclass(frozen=True, kw_only=True)
class TrafficUse:
    """Bytes that a rank sends with one cause."""

    cause: str
    """What is sent, and how."""

    nbytes: int
    """Bytes that the rank sends each time, or receives."""

    per: Literal["step", "interval"]
    """How often: in every inner step, or once in the interval between two rounds."""

    across: bool = False
    """Whether it leaves the worker or the job."""

    received: bool = False
    """Whether it comes from elsewhere; what ranks of the job send each other is listed where it is sent."""

    by_formula: bool = False
    """As of `MemoryUse`."""


@dataclass(frozen=True, kw_only=True)
class SavedPart:
    """A part of a checkpoint."""

    content: str
    """What it is."""

    nbytes: int
    """Bytes, of all ranks together."""


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """One rank."""

    rank: int
    """Its number."""

    stages: list[int]
    """Its pipeline stage, and those whose ranks hold and send as much."""

    stage_ranks: int
    """How many ranks of a worker are in each of them."""

    parameters: int
    """Elements of the parameters that it holds, copies that other ranks have too included."""

    trained: int
    """Elements that its optimizer updates: its shard with the distributed optimizer."""

    memory: list[MemoryUse]
    """By cause."""

    traffic: list[TrafficUse]
    """By cause."""

    @property
    def device_bytes(self) -> int:
        """What its device has to have."""
        return sum(use.nbytes for use in self.memory if use.place == "device")

    @property
    def host_bytes(self) -> int:
        """What its process takes of the host's memory for what is listed."""
        return sum(use.nbytes for use in self.memory if use.place == "host")

    def sent(self, per: str, *, across: bool | None = None) -> int:
        """Return the bytes that it sends per step or interval.

        Args:
            per: "step" or "interval".
            across: only what crosses workers, or only what does not; everything when None.
        """
        return sum(
            use.nbytes
            for use in self.traffic
            if use.per == per and across in (None, use.across) and not use.received
        )


@dataclass(frozen=True, kw_only=True)
class JobFigures:
    """A job."""

    sizes: dict[str, int]
    """`world`, `tp`, `pp`, `vpp`, `cp`, `ep`, `etp` and `dp`."""

    features: list[str]
    """Names of the features that the command line asks for."""

    workers: list[list[int]]
    """The ranks of every worker of local SGD; one list of all without it."""

    parameters: int | None
    """Elements of all parameters of the model, each once, rows that pad the vocabulary included; None where unknown."""

    active_parameters: int | None
    """Those that a token meets: all but routed experts, and of these the share of the top k. None as `parameters`."""

    step_tokens: int
    """Tokens of an inner step of one worker."""

    micro_batches: int
    """Micro-batches of a step of one data-parallel rank."""

    checkpoint: list[SavedPart]
    """What a checkpoint holds."""

    patches: dict[str, int]
    """How many patches will be applied: of the start, of each feature."""

    facts: dict[str, Any] = field(default_factory=dict)
    """What features say about themselves, by feature; what a program reads."""

    lines: list[str] = field(default_factory=list)
    """The same for people."""

    notes: list[str] = field(default_factory=list)
    """What the run will print about options that it changes, and what limits these figures."""
