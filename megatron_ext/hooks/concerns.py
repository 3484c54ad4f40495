# SPDX-License-Identifier: Apache-2.0
"""What some features answer beside what all do: one protocol for each concern.

A feature that has one lists it among its bases, and has all of its methods: half of one is refused by name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_ext.params import Layout

__all__ = [
    "CONCERNS",
    "NEEDING_PATCHES",
    "AddsLayouts",
    "CutsSamples",
    "CutsWorkers",
    "KeepsWeights",
    "LoadContext",
    "RankFiles",
    "RepeatsSteps",
    "ReplacesSchedule",
    "SaveContext",
    "SavesState",
    "WeighsExperts",
]


@dataclass(kw_only=True)
class RankFiles:
    """Where a rank's files of a checkpoint are in Megatron's legacy format (`--ckpt-format torch`)."""

    base: Path
    """The iteration's directory."""

    own: str
    """The folder of the rank's tensor, pipeline and expert indices, such as `mp_rank_00`."""

    part: str = ""
    """The folder between the two that a worker has for itself; empty where Megatron looks. A feature may change it."""

    leaves_head: bool = False
    """Whether this rank also writes a file without weights and states where Megatron looks, which says what the
    checkpoint is. A feature may change it."""

    def path(self, name: str, part: str | None = None) -> Path:
        """Return where a file is.

        Args:
            name: of the file.
            part: of a worker, as `part`; by default this rank's.
        """
        return self.base / (self.part if part is None else part) / self.own / name


@dataclass(frozen=True, kw_only=True)
class SaveContext:
    """A checkpoint's state dict being assembled, for writing or as the request of a read."""

    args: Any
    """Megatron's argument namespace."""

    model: list[Any]
    """The unwrapped model chunks."""

    optimizer: Any
    """The `MegatronOptimizer`, None when its state is not wanted."""

    scheduler: Any
    """The `OptimizerParamScheduler`, None when its state is not wanted."""

    state: dict[str, Any]
    """What Megatron's `generate_state_dict` returned; changed in place."""

    metadata: dict[str, Any]
    """The content metadata that shaped it."""

    loading: bool
    """Whether this is the request of a read."""

    files: RankFiles | None = None
    """Where this rank's files are, in Megatron's legacy format; None where all ranks write one checkpoint together.

    With files, `state` is empty, and all ranks are asked, whether they write a state dict or not: what is put into
    `state` is added to what this rank writes or reads, and must be plain values; tensors go to files of their own.
    """


@dataclass(frozen=True, kw_only=True)
class LoadContext:
    """A checkpoint being read."""

    args: Any
    """Megatron's argument namespace."""

    directory: str | None
    """The iteration's directory, None when there is none."""

    state: dict[str, Any]
    """Common state (`common_only`) or the whole loaded state; changed in place."""

    common_only: bool
    """Whether only the common part was read, to find out what the checkpoint holds."""

    release: bool = False
    """Whether it is a release, of which Megatron loads the weights alone."""

    is_legacy: bool = False
    """Whether it is in Megatron's legacy format, in which `state` is what one rank wrote."""


@runtime_checkable
class CutsWorkers(Protocol):
    """Cuts the data-parallel dimension into workers, which meet at some iterations only.

    Asked by `seams.process_groups.patches()`, and about the exit by `seams.training.patches()`.
    """

    @abstractmethod
    def worker_count(self, args: Any) -> int:
        """Return into how many workers the data-parallel dimension is cut (1 = not at all)."""

    @abstractmethod
    def may_exit(self, iteration: int) -> bool:
        """Return whether all ranks meet at this iteration and may vote on ending the run."""


@runtime_checkable
class AddsLayouts(Protocol):
    """Trains in further parallel layouts; asked by `seams.strategies.patches()`."""

    @abstractmethod
    def guest_layouts(self, args: Any) -> Sequence[Layout]:
        """Return further parallel layouts that need process groups, in the order in which they are numbered."""


@runtime_checkable
class ReplacesSchedule(Protocol):
    """Runs the forward and backward passes of a step in place of Megatron's schedule.

    Asked by `seams.training.loop_patches()`, and about the lengths by `seams.training.length_patches()`.
    """

    @abstractmethod
    def forward_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a training step calls for its forward and backward passes instead of `original`."""

    @abstractmethod
    def lengths_of_step(self) -> Sequence[int] | None:
        """Return the positions of every document of the last step's global batch; None where rows are full."""


@runtime_checkable
class CutsSamples(Protocol):
    """Trains a part of the samples, and other jobs the rest; asked by `seams.samples.patches()`."""

    @abstractmethod
    def data_part(self, args: Any) -> tuple[int, int]:
        """Return (index, count): which part of the training samples is this job's, of how many."""


@runtime_checkable
class RepeatsSteps(Protocol):
    """Makes several inner steps of an iteration of Megatron's loop, perhaps of other numbers on other workers.

    Asked by `seams.training.patches()`, and about the data by `seams.samples.patches()`.
    """

    @abstractmethod
    def another_step(self, made: int) -> bool:
        """Return whether one more inner step follows those made in this iteration; the same on a worker's ranks."""

    @abstractmethod
    def batches_of_iteration(self) -> float:
        """Return how many global batches all workers have made together in the last iteration."""

    @abstractmethod
    def data_place(self, args: Any, samples: int) -> int:
        """Return the sample at which this worker's own walk through the data begins.

        Args:
            args: Megatron's argument namespace.
            samples: how many there are, after which a walk starts again.
        """

    @abstractmethod
    def data_slack(self, args: Any) -> float | None:
        """Return how many times the samples of the run the training data are made for, because workers walk apart.

        None where all walk together.
        """


@runtime_checkable
class WeighsExperts(Protocol):
    """Changes how loaded experts look to the routers' loss; asked by `seams.router.patches()`."""

    @abstractmethod
    def expert_weights(self, experts: int) -> Tensor | None:
        """Return the factors of the experts' token counts in load-balancing losses, fp32, (experts,); None for none."""


@runtime_checkable
class KeepsWeights(Protocol):
    """Keeps weights beside the model's, such as an anchor, which follow when another feature changes the model's."""

    @abstractmethod
    def meet_before_sharing(self, iteration: int) -> None:
        """Another feature takes the weights that one worker has after this iteration for those of all."""

    @abstractmethod
    def follow_weights(self) -> None:
        """Another feature has given all ranks that train one model new weights, the same to all workers."""


@runtime_checkable
class SavesState(Protocol):
    """Has state of its own in checkpoints; asked by `seams.checkpoint.patches()`."""

    @abstractmethod
    def save_state(self, context: SaveContext) -> None:
        """Put the state into a checkpoint's state dict that was generated, or ask for it in the request of a read."""

    @abstractmethod
    def load_state(self, context: LoadContext) -> None:
        """Take the state out of what was read."""

    @abstractmethod
    def check_load(self, context: LoadContext) -> None:
        """Say or refuse what a run means in which this feature is not enabled and that loads such a checkpoint.

        Raises:
            UserError: the state must not be dropped.
        """


NEEDING_PATCHES = (
    CutsWorkers,
    AddsLayouts,
    ReplacesSchedule,
    CutsSamples,
    RepeatsSteps,
    WeighsExperts,
    SavesState,
)
"""The protocols whose questions are asked only where a patch is applied."""

CONCERNS = (*NEEDING_PATCHES, KeepsWeights)
"""All protocols of this file."""
