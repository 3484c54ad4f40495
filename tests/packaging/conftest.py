# SPDX-License-Identifier: Apache-2.0
"""Fixtures: stand-in machines and repositories, and the built wheel."""

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.packaging.machines import COMMANDS, ROOT, BuiltWheel, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with the basic commands and no Python."""
    result = Machine(tmp_path)
    result.bin.mkdir()
    result.home.mkdir()
    for command in COMMANDS:
        found = shutil.which(command)
        assert found, f"the command {command} is needed by the scripts under test"
        (result.bin / command).symlink_to(found)
    return result


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel of the installed setuptools: all that a stand-in repository needs to install."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    found = distribution("setuptools")
    assert found.files is not None
    with zipfile.ZipFile(folder / f"setuptools-{found.version}-py3-none-any.whl", "w") as archive:
        for file in found.files:
            if file.suffix != ".pyc" and ".." not in file.parts:
                archive.write(Path(str(file.locate())), str(file))
    return folder


@pytest.fixture
def make_repository(machine: Machine, wheelhouse: Path) -> Callable[[str], Path]:
    """Make a repository with the real scripts/lib/python_env.sh around a package without dependencies."""

    def make(name: str) -> Path:
        root = machine.folder / name
        (root / "scripts" / "lib").mkdir(parents=True)
        shutil.copy(ROOT / "scripts/lib/python_env.sh", root / "scripts/lib")
        (root / "megatron_ext").mkdir()
        (root / "megatron_ext" / "extras.py").write_text("")
        (root / "constraints.txt").write_text("# no pins\n")
        (root / "tiny_module.py").write_text("ANSWER = 42\n")
        (root / "setup.py").write_text(
            textwrap.dedent(
                """\
                from setuptools import setup

                setup(
                    name="tiny",
                    version="1",
                    py_modules=["tiny_module"],
                    extras_require={"tests": [], "plots": [], "data": [], "spes": []},
                )
                """
            )
        )
        return root

    # The interpreter behind the one that runs the tests is a real Python >= 3.12.
    machine.env["MEGATRON_EXT_PYTHON"] = os.path.realpath(sys.executable)
    machine.env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheelhouse)}
    return make


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> BuiltWheel:
    """Build the wheel once, from a copy: a build leaves folders behind, and stale ones would leak into it."""
    sources = tmp_path_factory.mktemp("sources") / "copy"
    sources.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, sources)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megatron_ext", sources / "megatron_ext", ignore=ignore)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--wheel-dir", str(out), str(sources)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = out.glob("*.whl")
    return BuiltWheel(file, sources)
