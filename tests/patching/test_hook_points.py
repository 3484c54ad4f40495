# SPDX-License-Identifier: Apache-2.0
"""A fork that declares hook points calls wrappers itself: nothing is rebound, and every copy follows."""

import inspect
import pickle
import sys
import types
from pathlib import Path

import pytest

from megatron_ext.patching import Patch, PatchError, PatchRegistry
from megatron_ext.patching.hook_points import hook_point_of
from tests.patching import targets

SOURCE = Path(targets.__file__).read_text(encoding="utf-8")
NAME = "fork_with_hook_points"
OF_CLASSES = ("Tool.plain", "Tool.static", "Tool.made", "Inheriting.plain")
DECLARED = ("double", *OF_CLASSES, "double", "gone", "Gone.plain", "Tool")


@pytest.fixture
def fork():
    """Yield a module that ends as the patch set lets those of a fork end."""
    module = types.ModuleType(NAME)
    sys.modules[NAME] = module
    end = f"\nfrom megatron_ext.patching.hook_points import declare as _declare\n_declare(globals(), *{DECLARED})\n"
    exec(compile(SOURCE + end, NAME, "exec"), vars(module))
    yield module
    del sys.modules[NAME]


@pytest.fixture
def registry():
    found = PatchRegistry()
    yield found
    found.revert()


def patch(attribute, name="test/hook", **fields):
    fields = {"wrap": targets.louder, "reason": "tested", "distribution": "torch", "versions": "", **fields}
    return Patch(name=name, target=f"{NAME}:{attribute}", **fields)


def test_without_a_patch_a_function_is_called_as_it_is(fork):
    assert fork.double(3) == 6
    assert fork.double(value=3, factor=3) == 9
    assert inspect.signature(fork.double) == inspect.signature(targets.double)
    assert pickle.loads(pickle.dumps(fork.double)) is fork.double
    assert (fork.Tool().plain(), fork.Tool.static(), fork.Inheriting.made()) == ("plain", "static", "Inheriting")
    assert isinstance(fork.Tool, type)


def test_a_patch_reaches_copies_under_any_name_in_any_module_and_rebinds_nothing(fork, registry):
    copy, module = fork.double, dict(vars(fork))
    registry.apply([patch("double")])
    assert copy(3) == fork.double(3) == 7
    (status,) = registry.explain(registry.applied)
    assert (status.hook_point, status.rebound) == (True, ())
    assert vars(fork) == module
    registry.revert()
    assert copy(3) == 6


@pytest.mark.parametrize("kind", ["plain", "static", "made"])
def test_every_kind_of_method_keeps_its_kind(fork, registry, kind):
    before = vars(fork.Tool)[kind]
    assert type(before) is type(vars(targets.Tool)[kind])
    registry.apply([patch(f"Tool.{kind}", parameters=("self",) if kind == "plain" else ())])
    assert getattr(fork.Tool(), kind)().endswith("!")
    assert vars(fork.Tool)[kind] is before
    registry.revert()
    assert not getattr(fork.Tool(), kind)().endswith("!")


def test_a_method_that_a_class_inherits_is_patched_in_the_subclass_alone(fork, registry):
    registry.apply([patch("Inheriting.plain")])
    assert (fork.Inheriting().plain(), fork.Tool().plain()) == ("plain!", "plain")
    assert not registry.explain(registry.applied)[0].hook_point


def test_patches_stack_and_leave_in_the_order_of_a_stack(fork, registry):
    registry.apply([patch("double"), patch("double", name="test/again")])
    assert fork.double(3) == 8
    with pytest.raises(PatchError, match="cannot be undone"):
        registry.revert(["test/hook"])
    registry.revert(["test/again"])
    assert fork.double(3) == 7


def test_a_copy_from_before_the_declaration_follows_too(fork, registry):
    early = types.ModuleType("pretrain_early")
    early.twice = hook_point_of(fork.double).original
    sys.modules[early.__name__] = early
    try:
        registry.apply([patch("double")])
        assert early.twice(3) == 7
        registry.revert()
        assert early.twice(3) == 6
    finally:
        del sys.modules[early.__name__]


def test_a_name_that_is_bound_in_one_module_only_stays_so(fork, registry):
    copy = fork.double
    registry.apply([patch("double", rebind=False)])
    assert (fork.double(3), copy(3)) == (7, 6)
    registry.revert()
    assert fork.double is copy


def test_a_function_that_someone_has_wrapped_is_patched_as_it_stands(fork, registry):
    point = fork.double
    fork.double = targets.louder(point)
    registry.apply([patch("double")])
    assert (fork.double(3), point(3)) == (8, 6)


def test_before_it_is_applied_a_patch_tells_that_its_target_is_a_hook_point(fork, registry):
    found = registry.explain([patch("double"), patch("Inheriting.plain"), patch("gone"), patch("double", rebind=False)])
    assert [status.hook_point for status in found] == [True, False, False, False]
    assert found[0].as_dict()["hook_point"] is True
