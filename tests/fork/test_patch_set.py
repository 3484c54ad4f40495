# SPDX-License-Identifier: Apache-2.0
"""The patch sets of patches/ are what the seams ask for, and lines at the end of files, nothing of Megatron's own."""

import re
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest
from packaging.specifiers import SpecifierSet

from megatron_ext.activation import known_patches
from megatron_ext.cli.main import main
from megatron_ext.fork.patch_set import ADDED_FILE, diff
from megatron_ext.fork.seam_fit import seams_of_megatron
from megatron_ext.fork.source import ForkSource
from megatron_ext.patching import Patch
from tests.support.distributed import REPOSITORY

INSTALLED = Path(megatron.core.__path__[0]).parents[1]
SETS = sorted((REPOSITORY / "patches").glob("core_v*/hook_points.patch"))
HOW = "make the sets again, as patches/README.md says"


def added(text: str) -> list[str]:
    return [line[1:] for line in text.splitlines() if line.startswith("+") and not line.startswith("+++")]


def test_the_set_of_the_installed_release_is_the_one_that_the_seams_make():
    source = ForkSource(INSTALLED)
    stored = REPOSITORY / f"patches/core_v{source.version.major}.{source.version.minor}/hook_points.patch"
    assert diff(source, seams_of_megatron(known_patches())) == stored.read_text(encoding="utf-8"), HOW


@pytest.mark.parametrize("patch_set", SETS, ids=lambda path: path.parent.name)
def test_every_set_names_the_functions_that_the_seams_wrap_in_its_release(patch_set: Path):
    release = patch_set.parent.name.removeprefix("core_v") + ".2"
    there = [patch for patch in seams_of_megatron(known_patches()) if patch.takes_hook_point]
    there = [patch for patch in there if not patch.missing_from or release not in SpecifierSet(patch.missing_from)]
    declared = re.findall(r'"([\w.]+)"', "\n".join(line for line in added(patch_set.read_text()) if '""' not in line))
    assert "train_step" in declared
    assert set(declared) - {"megatron_ext"} == {patch.attribute for patch in there}, HOW


@pytest.mark.parametrize("patch_set", SETS, ids=lambda path: path.parent.name)
def test_a_set_takes_nothing_away_and_quotes_one_line_of_each_file(patch_set: Path):
    first, *changes = patch_set.read_text(encoding="utf-8").split("diff --git ")[1:]
    assert first.startswith(f"a/{ADDED_FILE} ")
    for change in changes:
        _names, old, _new, hunk, *lines = change.splitlines()
        assert old.startswith("--- a/")
        assert re.fullmatch(r"@@ -\d+,1 \+\d+,\d+ @@", hunk)
        assert [line[:1] for line in lines] == [" ", *"+" * (len(lines) - 1)]


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 7\n")
    (core / "tools.py").write_text("class Base:\n    def step(self): pass\nclass Own(Base):\n    size = 1", newline="")
    return tmp_path


def patch(attribute: str, *parameters: str, rebind: bool = True) -> Patch:
    return Patch(
        name=attribute,
        target=f"megatron.core.tools:{attribute}",
        wrap=len,
        reason="tested",
        parameters=parameters,
        rebind=rebind,
    )


def test_only_functions_that_are_there_with_their_parameters_become_hook_points(fork: Path):
    seams = [patch("Base.step", "self"), patch("Own.step"), patch("Own.size"), patch("Own", rebind=False)]
    text = diff(ForkSource(fork), [*seams, patch("Base.step", "closure"), patch("gone")])
    assert added(text)[-1] == '_declare(globals(), "Base.step")'


def test_a_file_without_a_last_newline_gets_its_lines_and_loses_them_again(fork: Path):
    tools = fork / "megatron/core/tools.py"
    before = tools.read_bytes()
    text = diff(ForkSource(fork), [patch("Base.step")])
    subprocess.run(["git", "apply"], input=text, cwd=fork, text=True, check=True)
    assert tools.read_bytes().startswith(before + b"\nfrom ")
    subprocess.run(["git", "apply", "--reverse"], input=text, cwd=fork, text=True, check=True)
    assert tools.read_bytes() == before


def test_the_docs_count_the_seams_as_they_are():
    seams = seams_of_megatron(known_patches())
    apart = sum(not seam.takes_hook_point for seam in seams)
    assert f"of {len(seams)} seams" in (REPOSITORY / "docs" / "fork-migration.md").read_text()
    assert f"({apart} of {len(seams)} seams)" in (REPOSITORY / "patches" / "README.md").read_text()


def test_the_command_prints_the_diff_and_names_what_it_leaves_out(fork: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["patches", "--fork", str(fork), "--diff"]) == 0
    out, err = capsys.readouterr()
    assert f"+++ b/{ADDED_FILE}" in out
    assert "left out, see `megatron-ext patches --fork" in err
    assert "training/step" in err
    (fork / ADDED_FILE).write_text("")
    assert main(["patches", "--fork", str(fork), "--diff"]) == 2
    assert "take its hook points out first (patches/apply.sh --reverse)" in capsys.readouterr().err
    assert main(["patches", "--diff"]) == 2
    assert "say which with --fork DIR" in capsys.readouterr().err


def test_the_added_file_does_nothing_without_this_package_and_hides_no_damage_of_it(fork: Path):
    text = diff(ForkSource(fork), [])
    script = "\n".join([*added(text), "f = len", "declare(globals(), 'f')", "assert f is len"])
    alone = [sys.executable, "-S", "-c", script]  # without the folder of installed packages
    assert subprocess.run(alone, env={}, cwd=fork).returncode == 0
    (fork / "megatron_ext").mkdir()
    damaged = subprocess.run(alone, env={"PYTHONPATH": str(fork)}, cwd=fork, capture_output=True, text=True)
    assert "No module named 'megatron_ext.patching'" in damaged.stderr
