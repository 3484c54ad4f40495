# SPDX-License-Identifier: Apache-2.0
"""The features of this process, and how what the seams raise and ask reaches them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import UserError
from megatron_ext.hooks.concerns import (
    AddsLayouts,
    CutsSamples,
    CutsWorkers,
    KeepsWeights,
    LoadContext,
    RepeatsSteps,
    ReplacesSchedule,
    SaveContext,
    SavesState,
    WeighsExperts,
)
from megatron_ext.hooks.events import Event
from megatron_ext.hooks.feature import Feature
from megatron_ext.hooks.handlers import handlers_of
from megatron_ext.hooks.wholeness import unserved

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_ext.params import Layout

__all__ = ["Hooks", "hooks"]


class Hooks:
    """The features of this process and which of them are enabled; the seams raise their events here.

    Features are called in the order in which they were registered.
    """

    def __init__(self) -> None:
        self.features: tuple[Feature, ...] = ()
        self.reset()

    def register(self, features: Iterable[Feature]) -> None:
        """Make these the features of the process; none of them is enabled yet.

        Other packages' have passed `feature_problems` where they were loaded, which names their package.
        """
        self.reset()
        self.features = tuple(features)

    def enable(self, args: Any) -> tuple[Feature, ...]:
        """Make the features that `args` ask for the active ones and return them."""
        self.activate(feature for feature in self.features if feature.enabled(args))
        self._decided = True
        return self.active

    def require_served(self, serves: Iterable[tuple[Callable[..., Any], ...]]) -> None:
        """Refuse active features that wait for what does not come.

        Args:
            serves: `Patch.serves` of all patches that are applied.

        Raises:
            UserError: a feature has a handler of an event, or a method of a protocol, that none of them calls.
        """
        served = {called for all_called in serves for called in all_called}
        for feature in self.active:
            missing = unserved(type(feature), served)
            if missing:
                raise UserError(
                    f"the feature {feature.name!r} has what no patch of this run calls: {', '.join(missing)}; add the "
                    "patches that their descriptions in megatron_ext.hooks name to its required_patches"
                )

    def activate(self, features: Iterable[Feature]) -> None:
        """Make these the active features, and find out once what each of them handles and answers."""
        self.active = active = tuple(features)
        self._handlers: dict[type[Event], tuple[Callable[[Any], None], ...]] = {}
        for feature in active:
            for name, event in handlers_of(type(feature)).items():
                self._handlers[event] = (*self._handlers.get(event, ()), getattr(feature, name))
        # Some are asked at every step or layer, and to tell by a protocol what an object can takes microseconds.
        self._workers = tuple(feature for feature in active if isinstance(feature, CutsWorkers))
        self._samples = tuple(feature for feature in active if isinstance(feature, CutsSamples))
        self._experts = tuple(feature for feature in active if isinstance(feature, WeighsExperts))
        self._layouts = tuple(feature for feature in active if isinstance(feature, AddsLayouts))
        self._schedules = tuple(feature for feature in active if isinstance(feature, ReplacesSchedule))
        self._repeats = tuple(feature for feature in active if isinstance(feature, RepeatsSteps))
        self._weights = tuple(feature for feature in active if isinstance(feature, KeepsWeights))
        self._states = tuple(feature for feature in active if isinstance(feature, SavesState))

    def reset(self) -> None:
        """Forget all features."""
        self.features = ()
        self.activate(())
        self._decided = False

    def fire(self, event: Event) -> None:
        """Call the handlers that active features have for this type of event, in order.

        Raises:
            TypeError: `event` is something else.
        """
        handlers = self._handlers.get(type(event))
        if handlers is not None:
            for handler in handlers:
                handler(event)
        elif not isinstance(event, Event):
            raise TypeError(f"{event!r} is not an event; raise an object of a type in megatron_ext.hooks.events")

    def complete_arguments(self, args: Any) -> None:
        """Let every feature, active or not, fill in what it can before any validates."""
        for feature in self.features:
            feature.complete_arguments(args)

    def save_state(self, context: SaveContext) -> None:
        """Let the active features add their state to a checkpoint's, or ask for it."""
        for feature in self._states:
            feature.save_state(context)

    def load_state(self, context: LoadContext) -> None:
        """Let the active features take their state out of what was read."""
        for feature in self._states:
            feature.load_state(context)

    def check_load(self, context: LoadContext) -> None:
        """Let every feature that is not active say that it should be.

        Before arguments are validated none is: --use-checkpoint-args reads a checkpoint for the arguments in it.
        """
        for feature in self.features:
            if self._decided and feature not in self.active and isinstance(feature, SavesState):
                feature.check_load(context)

    def meet_before_sharing(self, iteration: int) -> None:
        """Say that a feature takes the weights that one worker has after this iteration for those of all."""
        for feature in self._weights:
            feature.meet_before_sharing(iteration)

    def follow_weights(self) -> None:
        """Say that a feature has given all ranks that train one model new weights, the same to all workers."""
        for feature in self._weights:
            feature.follow_weights()

    def worker_count(self, args: Any) -> int:
        """Return the largest worker count that an active feature asks for."""
        return max((feature.worker_count(args) for feature in self._workers), default=1)

    def may_exit(self, iteration: int) -> bool:
        """Return whether every active feature lets the run end at `iteration`."""
        return all(feature.may_exit(iteration) for feature in self._workers)

    def data_part(self, args: Any) -> tuple[int, int]:
        """Return (index, count) of the active feature that cuts the training samples, (0, 1) if none does."""
        return max((feature.data_part(args) for feature in self._samples), key=lambda part: part[1], default=(0, 1))

    def another_step(self, made: int) -> bool:
        """Return whether an active feature wants one more inner step after those made in this iteration."""
        return any(feature.another_step(made) for feature in self._repeats)

    def batches_of_iteration(self) -> float:
        """Return how many global batches the last iteration was, 1 where no active feature repeats steps."""
        return max((feature.batches_of_iteration() for feature in self._repeats), default=1.0)

    def data_place(self, args: Any, samples: int) -> int:
        """Return where the walk of this worker begins, where an active feature lets workers walk apart."""
        return max(feature.data_place(args, samples) for feature in self._repeats)

    def data_slack(self, args: Any) -> float | None:
        """Return how many times the samples of the run are needed, None where no active feature lets workers apart."""
        slacks = [feature.data_slack(args) for feature in self._repeats]
        return max((slack for slack in slacks if slack is not None), default=None)

    def expert_weights(self, experts: int) -> Tensor | None:
        """Return the weights of the active feature that has some, None if none has."""
        for feature in self._experts:
            weights = feature.expert_weights(experts)
            if weights is not None:
                return weights
        return None

    def guest_layouts(self, args: Any) -> list[Layout]:
        """Return all layouts beside the run's own that active features ask for."""
        return [layout for feature in self._layouts for layout in feature.guest_layouts(args)]

    def forward_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what every active feature, in order, makes of `original`."""
        for feature in self._schedules:
            original = feature.forward_backward(original)
        return original

    def lengths_of_step(self) -> Sequence[int] | None:
        """Return the lengths of the active feature that knows them, None if none does."""
        for feature in self._schedules:
            lengths = feature.lengths_of_step()
            if lengths is not None:
                return lengths
        return None


hooks = Hooks()
"""The process's hooks. Megatron's loop is module functions, so its observers are found through a module too."""
