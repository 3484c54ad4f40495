# SPDX-License-Identifier: Apache-2.0
"""Patches apply after their gates passed, are undone by identity, and explain themselves."""

import sys
import types

import pytest

from megatron_ext.patching import Patch, PatchError, PatchRegistry, SeamUnavailable
from tests.patching import targets

MODULE = "tests.patching.targets"


def patch(name="test/double", target=f"{MODULE}:double", **fields):
    """Return a record for the targets of this folder."""
    fields = {
        "wrap": targets.louder,
        "reason": "to be tested",
        "distribution": "torch",
        "versions": "",
        **fields,
    }
    return Patch(name=name, target=target, **fields)


@pytest.fixture
def registry():
    found = PatchRegistry()
    yield found
    found.revert()


def test_a_patch_wraps_and_reverting_restores_the_very_object(registry):
    original = targets.double
    registry.apply([patch()])
    assert targets.double(3) == 7
    registry.revert()
    assert targets.double is original


@pytest.mark.parametrize("kind", ["plain", "static", "made"])
def test_every_kind_of_method_keeps_its_kind(registry, kind):
    before = vars(targets.Tool)[kind]
    registry.apply([patch(target=f"{MODULE}:Tool.{kind}")])
    assert type(vars(targets.Tool)[kind]) is type(before)
    assert getattr(targets.Tool(), kind)().endswith("!")
    registry.revert()
    assert vars(targets.Tool)[kind] is before


def test_an_inherited_method_is_patched_in_the_subclass_and_removed_again(registry):
    registry.apply([patch(target=f"{MODULE}:Inheriting.plain")])
    assert targets.Inheriting().plain() == "plain!"
    assert targets.Tool().plain() == "plain"
    registry.revert()
    assert "plain" not in vars(targets.Inheriting)


def test_applying_twice_changes_nothing(registry):
    registry.apply([patch()])
    first = targets.double
    registry.apply([patch(wrap=registry.applied[0].wrap)])
    assert targets.double is first
    assert len(registry.applied) == 1


def test_two_different_patches_of_one_name_are_refused(registry):
    registry.apply([patch()])
    with pytest.raises(PatchError, match="another patch of that name"):
        registry.apply([patch(target=f"{MODULE}:Tool.plain")])


def test_two_patches_of_one_target_stack_and_unstack(registry):
    original = targets.double
    registry.apply([patch(), patch(name="test/again")])
    assert targets.double(3) == 8
    registry.revert(["test/again"])
    assert targets.double(3) == 7
    registry.revert()
    assert targets.double is original


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target": f"{MODULE}:missing"}, "does not exist"),
        ({"target": f"{MODULE}:Missing.plain"}, "has no Missing"),
        ({"target": "no.such.module:thing"}, "cannot be imported"),
        ({"parameters": ("value", "colour")}, "no parameter colour"),
        ({"versions": ">=999"}, "tested are >=999"),
        ({"distribution": "no-such-distribution", "versions": ">=1"}, "is not installed"),
    ],
)
def test_a_patch_that_does_not_fit_names_target_versions_parameters_and_reason(registry, fields, said):
    record = patch(**fields)
    with pytest.raises(PatchError, match=said) as error:
        registry.apply([record])
    for part in (record.name, record.target, record.reason, *record.parameters):
        assert part in str(error.value)


def test_one_misfit_keeps_all_the_others_off(registry):
    original = targets.double
    with pytest.raises(PatchError):
        registry.apply([patch(), patch(name="test/bad", target=f"{MODULE}:missing")])
    assert targets.double is original
    assert registry.applied == ()


def test_a_failing_wrapper_rolls_back_what_was_applied(registry):
    def fail(original):
        raise ValueError("cannot wrap")

    original = targets.double
    with pytest.raises(ValueError, match="cannot wrap"):
        registry.apply([patch(), patch(name="test/bad", target=f"{MODULE}:Tool.plain", wrap=fail)])
    assert targets.double is original


def test_copies_in_scripts_follow_by_identity_whatever_their_name(registry):
    script = types.ModuleType("pretrain_something")
    script.twice = targets.double
    script.other = len
    sys.modules[script.__name__] = script
    original = targets.double
    try:
        registry.apply([patch()])
        assert script.twice is targets.double is not original
        assert script.other is len
        (status,) = registry.explain([registry.applied[0]])
        assert status.rebound == ("pretrain_something.twice",)
        script.late = targets.double
        registry.revert()
        assert script.twice is script.late is original
    finally:
        del sys.modules[script.__name__]


@pytest.mark.parametrize("name", ["pretrain_something", "megatron.something"])
def test_copies_that_were_made_since_the_last_patches_follow_as_well(registry, monkeypatch, name):
    module = types.ModuleType(name)
    module.first = module.second = None
    monkeypatch.setitem(sys.modules, name, module)
    registry.apply([])
    if name.startswith("pretrain"):
        module.first = targets.double  # in the place of something else: looked for in scripts alone
    module.third = targets.double
    original = targets.double
    registry.apply([patch()])
    assert module.third is targets.double is not original
    assert module.first in (None, targets.double)
    assert [*registry.explain(registry.applied)[0].rebound].count(f"{name}.third") == 1
    registry.revert()
    assert module.third is original
    registry.apply([patch()])
    assert module.third is targets.double


@pytest.mark.parametrize("goes", [0, 1, 3], ids=["nothing else", "one goes", "more go than come"])
def test_copies_in_modules_that_a_wrapper_imports_follow_whatever_goes_meanwhile(registry, monkeypatch, goes):
    for name in ("here", "there", "elsewhere"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = types.ModuleType("megatron.something")
    module.copy = targets.double
    original = targets.double

    def importing(function):
        for name in ("here", "there", "elsewhere")[:goes]:
            del sys.modules[name]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return targets.louder(function)

    registry.apply([patch(name="test/first", target=f"{MODULE}:Tool.plain"), patch(wrap=importing)])
    assert module.copy is targets.double is not original


def test_a_target_that_someone_else_replaced_is_not_undone_silently():
    registry = PatchRegistry()
    original = targets.double
    registry.apply([patch()])
    ours, targets.double = targets.double, lambda value: value
    try:
        with pytest.raises(PatchError, match="replaced again by someone else"):
            registry.revert()
    finally:
        targets.double = ours
        registry.revert()
    assert targets.double is original


def test_explain_tells_every_status(registry):
    records = [
        patch(),
        patch(name="test/free", target=f"{MODULE}:Tool.plain"),
        patch(name="test/bad", target=f"{MODULE}:no"),
    ]
    registry.apply(records[:1])
    statuses = registry.explain(records)
    assert [status.status for status in statuses] == ["applied", "available", "broken"]
    assert statuses[2].as_dict()["problem"]


def test_a_record_without_a_colon_is_refused():
    with pytest.raises(ValueError, match="module:attribute"):
        patch(target="tests.patching.targets.double")


MISSING = [
    f"{MODULE}:halve",
    f"{MODULE}:Tool.halved",
    f"{MODULE}:Saw.halved",
    f"{MODULE}_of_wood:halve",
    "no_such:halve",
]


@pytest.mark.parametrize("target", MISSING)
def test_a_target_that_a_release_is_known_to_lack_is_unavailable_in_one_line(registry, target):
    (status,) = registry.explain([patch(target=target, missing_from=">=1", reason="be tested")])
    assert status.status == "unavailable"
    said = r"^torch \S+ has no \S+, which is needed to be tested; use another release than >=1$"
    with pytest.raises(SeamUnavailable, match=said):
        registry.apply([patch(target=target, missing_from=">=1", reason="be tested")])


@pytest.mark.parametrize("target", MISSING)
def test_a_patch_that_a_release_does_without_is_left_out_there(registry, target):
    without = patch(name="dispensable", target=target, missing_from=">=1", dispensable=True)
    registry.apply([without, patch()])
    assert [applied.name for applied in registry.applied] == [patch().name]
    (status,) = registry.explain([without])
    assert status.status == "unavailable"
    registry.revert()


@pytest.mark.parametrize("missing_from", ["", "<1"])
@pytest.mark.parametrize("target", MISSING)
def test_a_target_that_is_missing_elsewhere_is_an_error(registry, target, missing_from):
    (status,) = registry.explain([patch(target=target, missing_from=missing_from)])
    assert status.status == "broken"


def test_a_target_that_is_there_is_taken_whatever_is_known_of_the_release(registry):
    registry.apply([patch(missing_from=">=1")])
    assert targets.double(3) == 7
