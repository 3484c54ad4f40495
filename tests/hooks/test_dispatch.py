# SPDX-License-Identifier: Apache-2.0
"""What the seams ask of the active features: who answers, and what holds where nobody does."""

import pytest

from megatron_ext.errors import UserError
from megatron_ext.hooks import (
    CutsSamples,
    CutsWorkers,
    Feature,
    Hooks,
    KeepsWeights,
    LoadContext,
    ReplacesSchedule,
    SavesState,
)


class Workers(Feature, CutsWorkers):
    name = "workers"

    def __init__(self, count: int, exits: bool) -> None:
        self.count, self.exits = count, exits

    def worker_count(self, args):
        return self.count

    def may_exit(self, iteration):
        return self.exits


class Schedule(Feature, ReplacesSchedule):
    name = "schedule"

    def __init__(self, label: str, lengths: list[int] | None) -> None:
        self.label, self.lengths = label, lengths

    def forward_backward(self, original):
        return lambda: f"{self.label}({original()})"

    def lengths_of_step(self):
        return self.lengths


class Part(Feature, CutsSamples, KeepsWeights):
    name = "part"

    def __init__(self) -> None:
        self.told: list[str] = []

    def data_part(self, args):
        return 1, 3

    def meet_before_sharing(self, iteration):
        self.told.append(f"shared after {iteration}")

    def follow_weights(self):
        self.told.append("replaced")


class Stateful(Feature, SavesState):
    name = "stateful"
    on = False

    def enabled(self, args):
        return self.on

    def complete_arguments(self, args):
        args.append("completed")

    def save_state(self, context):
        context.append("saved")

    def load_state(self, context):
        context.append("loaded")

    def check_load(self, context):
        raise UserError("this checkpoint needs the feature")


def test_nobody_answers_for_stock_megatron():
    hooks = Hooks()
    assert hooks.worker_count(None) == 1 and hooks.may_exit(0) and hooks.data_part(None) == (0, 1)
    assert hooks.expert_weights(4) is None and hooks.lengths_of_step() is None and hooks.guest_layouts(None) == []
    assert hooks.forward_backward(len) is len
    assert not hooks.another_step(1) and hooks.batches_of_iteration() == 1 and hooks.data_slack(None) is None


def test_the_answers_of_several_features_become_one():
    hooks, part = Hooks(), Part()
    hooks.activate(
        [Workers(2, True), Schedule("a", None), Workers(4, False), Feature(), Schedule("b", [7]), part]
    )
    assert hooks.worker_count(None) == 4 and not hooks.may_exit(5) and hooks.data_part(None) == (1, 3)
    assert hooks.forward_backward(lambda: "stock")() == "b(a(stock))" and hooks.lengths_of_step() == [7]
    hooks.meet_before_sharing(8)
    hooks.follow_weights()
    assert part.told == ["shared after 8", "replaced"]


def test_a_feature_that_is_off_checks_what_is_loaded_and_completes_arguments():
    hooks, feature = Hooks(), Stateful()
    read = LoadContext(args=None, directory=None, state={}, common_only=True)
    hooks.register([feature])
    hooks.check_load(read)  # nothing was decided yet
    words: list[str] = []
    hooks.complete_arguments(words)
    hooks.enable(None)
    hooks.save_state(words)
    hooks.load_state(words)
    assert words == ["completed"]
    with pytest.raises(UserError, match="needs the feature"):
        hooks.check_load(read)


def test_a_feature_that_is_on_saves_and_loads():
    hooks, feature = Hooks(), Stateful()
    feature.on = True
    hooks.register([feature])
    assert hooks.enable(None) == (feature,)
    words: list[str] = []
    hooks.save_state(words)
    hooks.load_state(words)
    hooks.check_load(LoadContext(args=None, directory=None, state={}, common_only=True))
    assert words == ["saved", "loaded"]
