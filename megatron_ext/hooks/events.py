# SPDX-License-Identifier: Apache-2.0
"""The events of a run, each a type: what happens, what a handler is told, and which patches raise it.

They are in the order in which a run raises them first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_ext.hooks.concerns import LoadContext

if TYPE_CHECKING:
    from megatron_ext.worker_groups import WorkerGroups

__all__ = [
    "BuilderDone",
    "CheckpointRead",
    "ChunksBuilt",
    "EvaluationEnd",
    "EvaluationStart",
    "Event",
    "GroupsBuilt",
    "ModelBuilt",
    "SaveEnd",
    "SaveStart",
    "StepEnd",
    "StepStart",
    "TrainEnd",
    "TrainLeft",
    "TrainStart",
    "TrainingLog",
    "WorldReady",
]


class Event:
    """Something that happens in a run."""


@dataclass(frozen=True, kw_only=True)
class WorldReady(Event):
    """Ranks know each other, and there is no process group but the world; by `seams.process_groups.patches()`."""

    args: Any
    """Megatron's argument namespace."""

    waits: list[float] = field(default_factory=list)
    """Seconds that workers may have to wait for each other where none is late: their groups allow for the longest, in
    addition to `--distributed-timeout-minutes`."""


@dataclass(frozen=True, kw_only=True)
class GroupsBuilt(Event):
    """Model-parallel groups exist, and those of workers; by `seams.process_groups.patches()`."""

    groups: WorkerGroups
    """The workers."""


@dataclass(frozen=True, kw_only=True)
class ChunksBuilt(Event):
    """A rank's model chunks exist, on their device and in their precision, not yet wrapped in DDP.

    What is frozen now gets neither a gradient buffer nor an optimizer state. By `seams.training.chunk_patches()`.
    """

    args: Any
    """Megatron's argument namespace."""

    chunks: list[Any]
    """The model chunks."""


@dataclass(frozen=True, kw_only=True)
class BuilderDone(Event):
    """Megatron's builder has built this rank's model; the optimizer does not exist yet, and no checkpoint was loaded.

    By `seams.model.patches()`.
    """

    config: Any
    """The `GPTModelConfig`."""

    ddp_config: Any
    """The `DistributedDataParallelConfig`, None without DDP."""

    trains: bool
    """Whether the chunks are wrapped in DDP, that is, whether the run trains."""

    model: list[Any]
    """The model chunks."""

    build_again: Callable[..., list[Any]]
    """`build_again(config, **changes)` builds chunks of another config, with the builder's other options as they
    were, except for `changes`. No event is raised for them."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRead(LoadContext, Event):
    """A checkpoint's state was read, before any feature takes its own out; by `seams.checkpoint.load_patches()`.

    For features that look at it; one that has state in it is a `SavesState`.
    """


@dataclass(frozen=True, kw_only=True)
class ModelBuilt(Event):
    """Model and optimizer exist, a checkpoint was loaded if there was one; the data are not there yet.

    By `seams.training.model_patches()`.
    """

    args: Any
    """Megatron's argument namespace."""

    model: list[Any]
    """The model chunks, wrapped in DDP."""

    optimizer: Any
    """The `MegatronOptimizer`; None when there is nothing to train."""

    scheduler: Any
    """The `OptimizerParamScheduler`; None when there is nothing to train."""


@dataclass(frozen=True, kw_only=True)
class TrainStart(Event):
    """Model and optimizer exist, a checkpoint was loaded if there was one, no step was made yet.

    By `seams.training.loop_patches()`.
    """

    args: Any
    """Megatron's argument namespace."""

    model: list[Any]
    """The model chunks, wrapped in DDP."""

    optimizer: Any
    """The `MegatronOptimizer`."""

    scheduler: Any
    """The `OptimizerParamScheduler`."""

    config: Any
    """The `TransformerConfig` that the schedules read their functions from."""


@dataclass(frozen=True, kw_only=True)
class StepStart(Event):
    """A training step starts; by `seams.training.loop_patches()`."""

    iteration: int
    """Iterations finished before this step."""


@dataclass(frozen=True, kw_only=True)
class StepEnd(Event):
    """A training step ended: the inner optimizer and the scheduler have stepped; by `seams.training.loop_patches()`."""

    iteration: int
    """Iterations finished before this step."""

    completed: bool
    """Whether the step reached the optimizer (False when it asked to exit instead)."""

    losses: dict[str, Any] = field(default_factory=dict)
    """This step's losses by name: tensors of one element, only on the last pipeline stage."""

    steps: int = 1
    """Inner steps that this worker has made in the iteration."""

    skipped: int = 0
    """How many of them the inner optimizer skipped."""

    non_finite: int = 0
    """How many of those had a non-finite loss; only on the last pipeline stage."""


@dataclass(frozen=True, kw_only=True)
class TrainingLog(Event):
    """The training log accumulates, and perhaps prints a line. Handlers append to it; by `seams.logging.patches()`."""

    iteration: int
    """Iterations finished."""

    printing: bool
    """Whether the iteration line is printed now (`--log-interval`)."""

    total_losses: dict[str, Any]
    """Megatron's `total_loss_dict`: sums since the last line without this step's, by name; may be changed in
    place."""

    losses: dict[str, Any]
    """This step's losses by name, only on the last pipeline stage."""

    skipped: bool
    """Whether the inner optimizer skipped this step's update."""

    writing: bool
    """Whether TensorBoard and wandb values are written now (`--tensorboard-log-interval`)."""

    fields: list[tuple[str, str]] = field(default_factory=list)
    """(label, text) pairs appended to the iteration line."""

    scalars: dict[str, float] = field(default_factory=dict)
    """TensorBoard and wandb values by key, each written against samples as well."""

    timers: list[str] = field(default_factory=list)
    """Names of timers to report along with Megatron's own."""

    timed_iterations: list[int] = field(default_factory=list)
    """How many iterations timers are averaged over, where not over `--log-interval` of them; the last one holds."""


@dataclass(frozen=True, kw_only=True)
class EvaluationStart(Event):
    """Evaluation starts; by `seams.training.patches()`."""

    model: list[Any]
    """The model chunks."""


@dataclass(frozen=True, kw_only=True)
class EvaluationEnd(Event):
    """Evaluation ended, or failed; by `seams.training.patches()`."""

    model: list[Any]
    """The model chunks."""


@dataclass(frozen=True, kw_only=True)
class SaveStart(Event):
    """A checkpoint's state dict is about to be generated for writing; by `seams.checkpoint.patches()`."""


@dataclass(frozen=True, kw_only=True)
class SaveEnd(Event):
    """A checkpoint was written, or handed to what writes it; by `seams.checkpoint.patches()`."""


@dataclass(frozen=True, kw_only=True)
class TrainEnd(Event):
    """The training loop returned; by `seams.training.loop_patches()`."""


@dataclass(frozen=True, kw_only=True)
class TrainLeft(Event):
    """The training loop is left by an exception, which is raised again; by `seams.training.loop_patches()`."""

    error: BaseException
    """`SystemExit` where the run was asked to exit, else an error."""
