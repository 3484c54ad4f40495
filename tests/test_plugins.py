# SPDX-License-Identifier: Apache-2.0
"""Registries: names without imports, other packages' entry points, and everything wrong with one said by its name."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.errors import UserError
from megatron_ext.plugins import Registry
from tests.support.packages import installed, write_package

OWN = {"one": "tests.test_plugins:One", "two": "tests.test_plugins:Two"}


class One:
    """Ours."""


class Two:
    """Ours, too."""


def registry() -> Registry[type]:
    def problems(name: str, kind: object) -> list[str]:
        return [] if isinstance(kind, type) else [f"it is not a class of {name}"]

    return Registry("thing", "megatron_ext.things", OWN, problems)


def test_without_other_packages_there_are_our_own_and_an_unknown_name_is_told_them():
    things = registry()
    assert things.names() == ("one", "two") and things.find("two") is Two
    assert things.packages() == {"one": "", "two": ""}
    with pytest.raises(UserError, match=r"^thing 'three' is not known; use one of one, two$"):
        things.find("three")


def test_another_packages_is_named_without_an_import_and_imported_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    things = registry()
    assert "their-thing" not in things.names()  # what is installed later is found all the same
    installed(tmp_path, "things", "their_things", "class Own: pass", "their_things:Own", monkeypatch, "their-thing")
    assert things.names() == ("one", "two", "their-thing")
    assert things.packages()["their-thing"] == "their_things 1.0"
    assert "their_things" not in sys.modules
    assert things.find("their-thing").__module__ == "their_things"
    assert things.find("their-thing") is things.find("their-thing")


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("three", "", "the thing 'three' (theirs:Own) of package 'theirs' cannot be loaded: AttributeError: module"),
        ("three", "raise SystemExit", "of package 'theirs' cannot be loaded: SystemExit: no further message; repair"),
        ("three", "import nowhere_at_all", "cannot be loaded: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("three", "Own = 3", "cannot be used: it is not a class of three; repair or uninstall that package"),
        ("one", "class Own: pass", "package 'theirs' and megatron_ext both have a thing named 'one'; uninstall one"),
        ("Three", "class Own: pass", "package 'theirs' has a thing named 'Three'; a name has small letters, digits,"),
        ("a:b", "class Own: pass", "package 'theirs' has a thing named 'a:b'"),
    ],
)
def test_one_that_cannot_be_used_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str, said: str
):
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    installed(tmp_path, "things", "theirs", code, "theirs:Own", monkeypatch, name)
    with pytest.raises(UserError) as caught:
        registry().find("three" if name != "one" else registry().names()[-1])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_two_packages_with_one_name_are_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_package(tmp_path, "things", "their_left", "class Own: pass", "their_left:Own", "same")
    installed(tmp_path, "things", "their_right", "class Own: pass", "their_right:Own", monkeypatch, "same")
    with pytest.raises(UserError) as caught:
        registry().names()
    both = "package 'their_right' and package 'their_left' both have a thing named 'same'"
    assert str(caught.value) == f"{both}; uninstall one, or rename it"


def test_no_package_is_looked_for_when_the_configurations_are_imported():
    code = (
        "import importlib.metadata, torch\n"  # which looks for some of its own
        "importlib.metadata.entry_points = lambda **_: 1 / 0\n"
        "import megatron_ext.local_sgd, megatron_ext.sync_service.rounds.config\n"
        "import megatron_ext.sync_service.peer.client, megatron_ext.sync_service.megatron.arguments\n"
        "from megatron_ext.outer.codecs.all_codecs import build_codec\n"
        "print(build_codec('int8').name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "int8\n", done.stderr
