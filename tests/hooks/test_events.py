# SPDX-License-Identifier: Apache-2.0
"""Events are types: a handler gets those of its own, and whatever else is refused where it is written."""

import re
from dataclasses import FrozenInstanceError, fields

import pytest

from megatron_ext.hooks import Event, Feature, Hooks, StepEnd, StepStart, TrainEnd, TrainStart, on


class Recorder(Feature):
    """Writes down what it is told."""

    name = "recorder"

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name = name
        self.seen = seen

    @on(StepStart)
    def on_step_start(self, step: StepStart) -> None:
        self.seen.append(f"{self.name} starts {step.iteration}")

    @on(StepEnd)
    def count(self, step: StepEnd) -> None:
        self.seen.append(f"{self.name} ends {step.iteration}")


class Silent(Feature):
    """Handles nothing."""

    name = "silent"


class Heir(Recorder):
    """Replaces a handler, without marking it again, and adds one."""

    def count(self, step: StepEnd) -> None:
        self.seen.append(f"{self.name} counts {step.iteration}")

    @on(StepEnd)
    def also(self, step: StepEnd) -> None:
        self.seen.append(f"{self.name} also {step.iteration}")


def test_handlers_are_called_in_the_order_of_the_features_with_the_events_of_their_type():
    seen: list[str] = []
    hooks = Hooks()
    hooks.activate([Recorder("b", seen), Silent(), Recorder("a", seen)])
    hooks.fire(StepStart(iteration=3))
    hooks.fire(TrainEnd())
    hooks.fire(StepEnd(iteration=3, completed=True))
    assert seen == ["b starts 3", "a starts 3", "b ends 3", "a ends 3"]


def test_a_subclass_replaces_a_handler_and_adds_one():
    seen: list[str] = []
    hooks = Hooks()
    hooks.activate([Heir("heir", seen)])
    hooks.fire(StepEnd(iteration=0, completed=True))
    assert seen == ["heir counts 0", "heir also 0"]


def test_a_feature_that_is_not_active_is_told_nothing():
    seen: list[str] = []
    hooks = Hooks()
    hooks.register([Recorder("off", seen)])
    hooks.enable(None)
    hooks.fire(StepStart(iteration=0))
    assert hooks.active == () and seen == []


@pytest.mark.parametrize("wrong", ["after_step", StepEnd, None], ids=["name", "type", "nothing"])
def test_only_an_event_can_be_raised(wrong):
    with pytest.raises(TypeError, match=re.escape(f"{wrong!r} is not an event; raise an object of a type in meg")):
        Hooks().fire(wrong)


def test_an_event_has_its_own_values_and_keeps_them():
    with pytest.raises(TypeError, match="unexpected keyword argument 'step'"):
        StepStart(step=1)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'completed'"):
        StepEnd(iteration=1)
    with pytest.raises(FrozenInstanceError):
        StepStart(iteration=1).iteration = 2


@pytest.mark.parametrize("wrong", ["on_step_end", Event, int], ids=["name", "any", "other type"])
def test_a_handler_of_no_event_is_refused_where_it_is_marked(wrong):
    with pytest.raises(TypeError, match=re.escape(f"@on({wrong!r}): that is not an event")):
        on(wrong)


def test_a_handler_with_other_arguments_is_refused_where_it_is_marked():
    wanted = re.escape("later(self, step, loss) cannot handle StepEnd: a handler takes the event alone, (self, event: ")
    with pytest.raises(TypeError, match=wanted):

        class _(Feature):
            @on(StepEnd)
            def later(self, step, loss):
                pass


def test_events_of_the_loop_say_what_megatron_has():
    assert [field.name for field in fields(TrainStart)] == ["args", "model", "optimizer", "scheduler", "config"]
