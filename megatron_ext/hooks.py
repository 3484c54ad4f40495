# SPDX-License-Identifier: Apache-2.0
"""The events that the seams raise, and the Feature that answers them.

An ability of this package is one `Feature`. The seams (`megatron_ext.seams`) know Megatron and raise events;
a feature knows its algorithm and handles them; neither imports the other. Which features a run has is decided
once, when its arguments are validated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_ext.params import Layout
    from megatron_ext.patching import Patch
    from megatron_ext.worker_groups import WorkerGroups

__all__ = [
    "BuilderContext",
    "ChunksContext",
    "EvaluationContext",
    "Feature",
    "Hooks",
    "LoadContext",
    "LogContext",
    "ModelContext",
    "SaveContext",
    "StepContext",
    "TrainContext",
]


@dataclass(kw_only=True)
class ChunksContext:
    """A rank's model chunks, on their device and in their precision, not yet wrapped in DDP."""

    args: Any
    """Megatron's argument namespace."""

    chunks: list[Any]
    """The model chunks."""


@dataclass(kw_only=True)
class ModelContext:
    """Model and optimizer as Megatron has built them."""

    args: Any
    """Megatron's argument namespace."""

    model: list[Any]
    """The model chunks, wrapped in DDP."""

    optimizer: Any
    """The `MegatronOptimizer`; None when there is nothing to train."""

    scheduler: Any
    """The `OptimizerParamScheduler`; None when there is nothing to train."""


@dataclass(kw_only=True)
class BuilderContext:
    """A model that Megatron's builder has built for this rank."""

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
    were but for `changes`. No event is raised for them."""


@dataclass(kw_only=True)
class TrainContext:
    """A training loop about to start: Megatron's own objects."""

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


@dataclass(kw_only=True)
class StepContext:
    """One training step."""

    iteration: int
    """Iterations finished before this step."""

    completed: bool = False
    """Whether the step reached the optimizer (False before the step, and when it asked to exit instead)."""

    losses: dict[str, Any] = field(default_factory=dict)
    """This step's losses by name: tensors of one element, only on the last pipeline stage; empty before the step."""


@dataclass(kw_only=True)
class EvaluationContext:
    """One call of the evaluation loop."""

    model: list[Any]
    """The model chunks."""


@dataclass(kw_only=True)
class LogContext:
    """One line of the training log; handlers append to it."""

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


@dataclass(kw_only=True)
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


@dataclass(kw_only=True)
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


class Feature:
    """One ability: its arguments, its patches, and its handlers. Every handler does nothing by default."""

    name: str = ""
    """Short name, used in errors, patch names and log keys."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the ability's argument groups."""

    def enabled(self, args: Any) -> bool:
        """Return whether the parsed arguments ask for the ability."""
        return False

    def complete_arguments(self, args: Any) -> None:
        """Fill in arguments that a file of the user's gives; called before any feature validates them.

        Raises:
            UserError: the file cannot be used.
        """

    def validate(self, args: Any) -> list[str]:
        """Return every problem of the arguments, one sentence each: the field, and what to change.

        Called before Megatron's own validation, also when the ability is off (for options that need it).
        """
        return []

    def adjust_arguments(self, args: Any) -> list[str]:
        """Change arguments that the ability decides; return one line to print for each change."""
        return []

    def patches(self) -> Sequence[Patch]:
        """Return every patch that the ability may need; they are applied only when it is enabled."""
        return ()

    def worker_count(self, args: Any) -> int:
        """Return into how many workers the data-parallel dimension is cut (1 = not at all)."""
        return 1

    def data_part(self, args: Any) -> tuple[int, int]:
        """Return (index, count): which part of the training samples is this job's, of how many."""
        return 0, 1

    def expert_weights(self, experts: int) -> Tensor | None:
        """Return the factors of the experts' token counts in load-balancing losses, fp32, (experts,); None for none."""
        return None

    def lengths_of_step(self) -> Sequence[int] | None:
        """Return the positions of every document of the last step's global batch; None where rows are full."""
        return None

    def guest_layouts(self, args: Any) -> Sequence[Layout]:
        """Return further parallel layouts that need process groups, in the order in which they are numbered."""
        return ()

    def before_groups(self, args: Any) -> None:
        """Ranks know each other, and there is no process group but the world; `args` are Megatron's arguments."""

    def on_groups_built(self, groups: WorkerGroups) -> None:
        """Model-parallel groups exist; `groups` describes the workers."""

    def on_chunks_built(self, context: ChunksContext) -> None:
        """Model chunks exist; what is frozen now gets neither a gradient buffer nor an optimizer state."""

    def on_model_built(self, context: ModelContext) -> None:
        """Model and optimizer exist, a checkpoint was loaded if there was one; the data are not there yet."""

    def on_builder_done(self, context: BuilderContext) -> None:
        """The model chunks exist; the optimizer does not yet, and no checkpoint was loaded."""

    def on_train_start(self, context: TrainContext) -> None:
        """Model and optimizer exist, a checkpoint was loaded if there was one, no step was made yet."""

    def before_step(self, context: StepContext) -> None:
        """A training step starts."""

    def forward_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a training step calls for its forward and backward passes instead of `original`."""
        return original

    def after_step(self, context: StepContext) -> None:
        """A training step ended: the inner optimizer and the scheduler have stepped."""

    def before_weights_shared(self, iteration: int) -> None:
        """Another feature takes the weights that one worker has after this iteration for those of all."""

    def on_weights_replaced(self) -> None:
        """Another feature has given all ranks that train one model new weights, the same to all workers."""

    def may_exit(self, iteration: int) -> bool:
        """Return whether all ranks meet at this iteration and may vote on ending the run."""
        return True

    def before_evaluation(self, context: EvaluationContext) -> None:
        """Evaluation starts."""

    def after_evaluation(self, context: EvaluationContext) -> None:
        """Evaluation ended."""

    def on_log(self, context: LogContext) -> None:
        """The training log accumulates, and perhaps prints."""

    def before_save(self) -> None:
        """A checkpoint's state dict is about to be generated for writing."""

    def on_save(self, context: SaveContext) -> None:
        """A checkpoint's state dict was generated."""

    def on_load(self, context: LoadContext) -> None:
        """A checkpoint's state was read."""

    def check_load(self, context: LoadContext) -> None:
        """A checkpoint's state was read by a run in which this feature is not enabled."""

    def on_train_end(self, context: TrainContext) -> None:
        """The training loop returned."""

    def on_train_left(self, error: BaseException) -> None:
        """The training loop is left by an exception: `SystemExit` where it was asked to exit, else an error."""


class Hooks:
    """The features of this process and which of them are enabled; the seams raise their events here."""

    def __init__(self) -> None:
        self.features: tuple[Feature, ...] = ()
        self.active: tuple[Feature, ...] = ()
        self._decided = False

    def enable(self, args: Any) -> tuple[Feature, ...]:
        """Make the features that `args` ask for the active ones and return them."""
        self.active = tuple(feature for feature in self.features if feature.enabled(args))
        self._decided = True
        return self.active

    def reset(self) -> None:
        """Forget all features."""
        self.features = ()
        self.active = ()
        self._decided = False

    def fire(self, event: str, *arguments: Any) -> None:
        """Call the handler named `event` of every active feature, in order."""
        for feature in self.active:
            getattr(feature, event)(*arguments)

    def check_load(self, context: LoadContext) -> None:
        """Let every feature that is not active say that it should be.

        Before arguments are validated none is: --use-checkpoint-args reads a checkpoint for the arguments in it.
        """
        for feature in self.features:
            if self._decided and feature not in self.active:
                feature.check_load(context)

    def worker_count(self, args: Any) -> int:
        """Return the largest worker count that an active feature asks for."""
        return max([feature.worker_count(args) for feature in self.active], default=1)

    def data_part(self, args: Any) -> tuple[int, int]:
        """Return (index, count) of the active feature that cuts the training samples, (0, 1) if none does."""
        return max((feature.data_part(args) for feature in self.active), key=lambda part: part[1], default=(0, 1))

    def expert_weights(self, experts: int) -> Tensor | None:
        """Return the weights of the active feature that has some, None if none has."""
        found = (feature.expert_weights(experts) for feature in self.active)
        return next((weights for weights in found if weights is not None), None)

    def lengths_of_step(self) -> Sequence[int] | None:
        """Return the lengths of the active feature that knows them, None if none does."""
        found = (feature.lengths_of_step() for feature in self.active)
        return next((lengths for lengths in found if lengths is not None), None)

    def guest_layouts(self, args: Any) -> list[Layout]:
        """Return all layouts beside the run's own that active features ask for."""
        return [layout for feature in self.active for layout in feature.guest_layouts(args)]

    def forward_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what every active feature, in order, makes of `original`."""
        for feature in self.active:
            original = feature.forward_backward(original)
        return original

    def may_exit(self, iteration: int) -> bool:
        """Return whether every active feature lets the run end at `iteration`."""
        return all(feature.may_exit(iteration) for feature in self.active)


hooks = Hooks()
"""The process's hooks. Megatron's loop is module functions, so its observers are found through a module too."""
