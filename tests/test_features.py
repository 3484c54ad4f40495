# SPDX-License-Identifier: Apache-2.0
"""Features of other packages: found by their entry points, and refused by name when something is wrong with them."""

from pathlib import Path

import pytest

from megatron_ext.errors import UserError
from megatron_ext.features import all_features
from tests.support.distributed import run_ranks
from tests.support.packages import installed

OWN = ["hot-switch", "local-sgd", "spes", "sync-service"]
FEATURE = """
from megatron_ext.hooks import Feature

class Own(Feature):
    name = {name!r}
"""
HALF = """
from megatron_ext.hooks import Feature, SavesState

class Own(Feature, SavesState):
    name = "half"

    def save_state(self, context):
        pass
"""
START = """
    def __init__(self):
        raise OSError("no disk")
"""


def test_without_other_packages_there_are_the_four_features():
    assert [feature.name for feature in all_features()] == OWN


def test_another_packages_feature_comes_after_the_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    installed(tmp_path, "features", "their_first", FEATURE.format(name="theirs"), "their_first:Own", monkeypatch)
    assert [feature.name for feature in all_features()] == [*OWN, "theirs"]


@pytest.mark.parametrize(
    ("package", "code", "value", "said"),
    [
        ("their_gone", "", "their_gone:Own", r"'their_gone' \(their_gone:Own\) of package 'their_gone' cannot be"),
        ("their_error", "import nowhere_to_be_found", "their_error:Own", "No module named 'nowhere_to_be_found'"),
        ("their_text", "raise ImportError('first\\n  second\\n')", "their_text:Own", "Error: first second; repair"),
        ("their_exit", "raise SystemExit", "their_exit:Own", "loaded: SystemExit: no further message; repair"),
        ("their_half", HALF, "their_half:Own", "used: it has not all of SavesState: add load_state, check_load"),
        ("their_start", FEATURE.format(name="x") + START, "their_start:Own", "loaded: OSError: no disk; repair"),
        ("their_other", "Own = dict", "their_other:Own", "it is not a named megatron_ext.hooks.Feature"),
        ("their_nameless", FEATURE.format(name=""), "their_nameless:Own", "is not a named megatron_ext.hooks.Feature"),
        ("their_spes", FEATURE.format(name="spes"), "their_spes:Own", "megatron_ext both have a feature named 'spes'"),
        ("their_cpu", FEATURE.format(name="cpu"), "their_cpu:Own", "megatron_ext both have a feature named 'cpu'"),
    ],
)
def test_a_feature_that_cannot_be_used_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, code: str, value: str, said: str
):
    installed(tmp_path, "features", package, code, value, monkeypatch)
    with pytest.raises(UserError, match=said) as caught:
        all_features()
    assert f"package {package!r}" in str(caught.value)
    assert "\n" not in str(caught.value)


def patch_with(folder: str) -> tuple[str, int, bool]:
    """Return what `patch_megatron` says beside the packages of a folder, and what it leaves behind."""
    import sys

    from megatron_ext.activation import patch_megatron, registry
    from megatron_ext.hooks import hooks

    sys.path.insert(0, folder)
    with pytest.raises(UserError) as caught:
        patch_megatron("cpu")
    return str(caught.value), len(registry().applied), bool(hooks.features)


def test_beside_a_feature_that_cannot_be_used_nothing_is_patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    installed(tmp_path, "features", "their_gap", HALF, "their_gap:Own", monkeypatch)
    ((said, applied, registered),) = run_ranks(patch_with, 1, str(tmp_path))
    assert said.startswith("the feature 'their_gap' (their_gap:Own) of package 'their_gap' cannot be used: it has not")
    assert (applied, registered) == (0, False)


def test_two_packages_with_a_feature_of_one_name_are_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for package in ("their_left", "their_right"):
        installed(tmp_path, "features", package, FEATURE.format(name="same"), f"{package}:Own", monkeypatch)
    with pytest.raises(UserError) as caught:
        all_features()
    both = "package 'their_right' and package 'their_left' both have a feature named 'same'"
    assert str(caught.value) == f"{both}; uninstall one, or rename it"
