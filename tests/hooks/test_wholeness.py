# SPDX-License-Identifier: Apache-2.0
"""A feature is refused by name, before a run begins, where something of it would never be called."""

import importlib
import re

import pytest

from megatron_ext.backends.cpu.feature import CpuFeature
from megatron_ext.errors import UserError
from megatron_ext.features import all_features
from megatron_ext.hooks import (
    CutsSamples,
    CutsWorkers,
    Event,
    Feature,
    GroupsBuilt,
    Hooks,
    ReplacesSchedule,
    SavesState,
    StepEnd,
    StepStart,
    WeighsExperts,
    feature_problems,
    on,
)
from megatron_ext.hooks.concerns import CONCERNS, NEEDING_PATCHES
from megatron_ext.hooks.wholeness import unserved
from megatron_ext.seams import process_groups, training


class HalfByBase(Feature, SavesState):
    name = "half-by-base"

    def save_state(self, context):
        pass


class HalfByMethods(Feature):
    name = "half-by-methods"

    def worker_count(self, args):
        return 2


class OtherArguments(Feature, CutsWorkers):
    name = "other-arguments"

    def worker_count(self):
        return 2

    def may_exit(self, iteration):
        return True


class Unmarked(Feature):
    name = "unmarked"

    def on_step_end(self, step):
        pass


class FormerHandler(Feature):
    name = "former-handler"

    def after_step(self, context):
        pass


class FormerPatches(Feature):
    name = "former-patches"

    def patches(self):
        return []


class Asks(Feature):
    name = "asks"

    def validate(self):
        return []


class ByMethods(Feature):
    """Has a whole protocol without naming it, a helper, and a handler under a name of its own."""

    name = "by-methods"

    def worker_count(self, args, *, least=1):
        return 3

    def may_exit(self, iteration):
        return True

    def _on_something(self):
        pass

    @on(StepEnd)
    def count(self, step):
        pass


class WithoutSelf(Feature, CutsSamples):
    name = "without-self"

    @staticmethod
    def enabled(args):
        return True

    @classmethod
    def validate(cls, args):
        return []

    @staticmethod
    def data_part(args):
        return 0, 2


class StaticOtherArguments(Feature):
    name = "static-other-arguments"

    @staticmethod
    def validate(first, second):
        return []


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (HalfByBase, "it has not all of SavesState: add load_state, check_load"),
        (HalfByMethods, "it has not all of CutsWorkers: add may_exit"),
        (OtherArguments, "worker_count(self) takes other arguments than CutsWorkers: (self, args)"),
        (Unmarked, "on_step_end handles no event: mark it with @on(...), or let its name begin otherwise"),
        (FormerHandler, "after_step handles no event: mark it with @on(...), or let its name begin otherwise"),
        (FormerPatches, "patches is called required_patches"),
        (Asks, "validate(self) takes other arguments than Feature: (self, args)"),
        (StaticOtherArguments, "validate(first, second) takes other arguments than Feature: (self, args)"),
        (dict, "it is not a named megatron_ext.hooks.Feature"),
        (Feature, "it is not a named megatron_ext.hooks.Feature"),
        ("text", "it is not a named megatron_ext.hooks.Feature"),
    ],
)
def test_what_would_never_be_called_is_said(kind, said):
    assert feature_problems(kind) == [said]


def test_features_of_this_package_and_protocols_without_a_base_are_whole():
    kinds = [CpuFeature, ByMethods, WithoutSelf, *(type(feature) for feature in all_features())]
    assert [feature_problems(kind) for kind in kinds] == [[]] * 7
    hooks = Hooks()
    hooks.activate([ByMethods()])
    assert hooks.worker_count(None) == 3


class Waits(Feature, WeighsExperts):
    """Waits for a step, and for workers if there are any."""

    name = "waits"

    def enabled(self, args):
        return True

    def expert_weights(self, experts):
        return None

    @on(StepEnd)
    def on_step_end(self, step):
        pass

    @on(GroupsBuilt, always=False)
    def on_groups_built(self, event):
        pass


def test_a_feature_that_waits_for_what_no_patch_raises_is_refused():
    hooks = Hooks()
    hooks.register([Waits()])
    hooks.require_served([])  # it is not active
    hooks.enable(None)
    hooks.require_served([(StepEnd, StepStart), (), (WeighsExperts.expert_weights,)])
    weights = "WeighsExperts.expert_weights"
    for serves, missing in (([], f"StepEnd, {weights}"), ([(StepEnd,)], weights)):
        with pytest.raises(UserError) as caught:
            hooks.require_served(serves)
        said = f"the feature 'waits' has what no patch of this run calls: {missing}; add the patches that their"
        assert str(caught.value) == f"{said} descriptions in megatron_ext.hooks name to its required_patches"


class ReplacesAndCuts(Feature, ReplacesSchedule, CutsWorkers):
    name = "replaces-and-cuts"

    def enabled(self, args):
        return True

    def forward_backward(self, original):
        return original

    def lengths_of_step(self):
        return [1]

    def worker_count(self, args):
        return 2

    def may_exit(self, iteration):
        return False


def test_a_protocol_of_which_patches_ask_a_part_is_refused():
    hooks = Hooks()
    hooks.register([ReplacesAndCuts()])
    hooks.enable(None)
    some = [*process_groups.patches(), *training.loop_patches()]
    with pytest.raises(UserError, match=r"calls: CutsWorkers\.may_exit, ReplacesSchedule\.lengths_of_step; add"):
        hooks.require_served(patch.serves for patch in some)
    every = [*process_groups.patches(), *training.patches(), *training.length_patches()]
    hooks.require_served(patch.serves for patch in every)


def test_the_patches_of_every_feature_of_this_package_serve_it():
    for feature in all_features():
        called = {called for patch in feature.required_patches() for called in patch.serves}
        assert unserved(type(feature), called) == [], feature.name


@pytest.mark.parametrize("kind", [*Event.__subclasses__(), *NEEDING_PATCHES], ids=lambda kind: kind.__name__)
def test_every_event_and_protocol_names_the_patches_that_serve_it(kind):
    methods = [value for value in vars(kind).values() if getattr(value, "__isabstractmethod__", False)]
    wanted = set(methods or [kind])
    served = set()
    for module, function in re.findall(r"[Bb]y `seams\.(\w+)\.(\w+)\(\)`", kind.__doc__):
        patches = getattr(importlib.import_module(f"megatron_ext.seams.{module}"), function)()
        here = wanted & {called for patch in patches for called in patch.serves}
        assert here, f"{function} has nothing of it"
        served |= here
    assert served == wanted


def test_every_protocol_of_the_file_is_asked_about():
    from megatron_ext.hooks import concerns

    listed = {name for name, found in vars(concerns).items() if getattr(found, "_is_protocol", False)}
    assert {protocol.__name__ for protocol in CONCERNS} == listed - {"Protocol"}
