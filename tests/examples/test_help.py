# SPDX-License-Identifier: Apache-2.0
"""Every script of examples/ answers --help with the variables that it reads and their defaults, and starts nothing."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.distributed import REPOSITORY

FOLDER = REPOSITORY / "examples"
SHELL = [path for path in sorted(FOLDER.rglob("*.sh")) if path.parent.name != "lib"]
# The other Python files are parts of a script, or Megatron's (pretrain_gpt.py).
PYTHON = [
    path
    for path in sorted(FOLDER.rglob("*.py"))
    if "add_argument" in path.read_text() and path.name not in {"measured_pretrain.py", "parameter_norm.py"}
]

OWN_HELP = "usage()"
"""A quickstart's."""
REFERENCES = {
    "run_cluster.sh": ["spes/run_parameter_server.sh", "spes/run_single_node.sh"],
    "llama_baseline.sh": ["hot_switch/llama_hot_switch.sh"],
    "llama_static_parallel.sh": ["hot_switch/llama_hot_switch.sh"],
    "exprs_for_A100_40G.sh": ["hot_switch/llama_hot_switch.sh"],
    "run_paper_case": ["hot_switch/llama_hot_switch.sh"],
}
"""Scripts whose help says that they read what others do."""
NOT_THE_USERS = {"BASH_SOURCE", "NODE_ID", "PYTHONPATH"}
_READ = re.compile(r"\$\{!?([A-Z][A-Z_]+):?([-+])([^}]*)\}")


def answer(script: Path, folder: Path) -> str:
    """Return what a script prints, of which nothing is an error, where there is no Python that it could start."""
    found = subprocess.run(
        ["bash", str(script), "--help"],
        cwd=folder,
        env={"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (found.returncode, found.stderr) == (0, ""), (script, found)
    return found.stdout


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    """Return a folder whose python and torchrun say that they were started."""
    for name in ("python", "python3", "torchrun", "nvidia-smi", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\necho started >&2\nexit 9\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def without_comments(text: str) -> str:
    return re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE)


def functions() -> dict[str, str]:
    """Return the shell functions that scripts share, by their names."""
    found: dict[str, str] = {}
    for path in [*FOLDER.rglob("lib/*.sh"), REPOSITORY / "scripts/lib/hosts.sh"]:
        text = without_comments(path.read_text())
        found |= dict(re.findall(r"^(\w+)\(\) \{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    return found


def sources(script: Path, shared: dict[str, str]) -> str:
    """Return a script, and every function that it calls, and those that these call."""
    text, called = without_comments(script.read_text()), {"answer_help", "read_options"}
    while names := {name for name in re.findall(r"\w+", text) if name in shared} - called:
        called |= names
        text += "".join(shared[name] for name in names)
    return text


def reads(text: str) -> dict[str, set[str]]:
    """Return the variables that a script takes from its environment, with their defaults that are a word."""
    found: dict[str, set[str]] = {}
    for name, sign, default in _READ.findall(text):
        if name not in NOT_THE_USERS and not name.startswith("SLURM"):
            words = {default} if sign == "-" and re.fullmatch(r"[\w.:]{2,}", default) else set()
            found[name] = found.get(name, set()) | words
    return found


def test_every_script_answers_help_and_starts_nothing(folder: Path) -> None:
    assert len(SHELL) >= 20
    kept = sorted(os.listdir(folder))
    for script in [*SHELL, *sorted((REPOSITORY / "scripts").glob("*.sh"))]:
        text = answer(script, folder)
        assert len(text) > 200 and not text.startswith("#"), script
        assert script.name in text or "same as" in script.read_text().lower(), script
        assert script.stat().st_mode & 0o111, script
    assert sorted(os.listdir(folder)) == kept


def test_the_help_has_every_variable_that_a_script_reads_and_its_default(folder: Path) -> None:
    shared = functions()
    checked = 0
    for script in SHELL:
        own = script.read_text()
        if OWN_HELP in own or "same as" in own:
            continue
        text = answer(script, folder)
        for other in REFERENCES.get("run_paper_case" if "run_paper_case" in own else script.name, []):
            assert Path(other).name in text
            text += answer(FOLDER / other, folder)
        for name, defaults in reads(sources(script, shared)).items():
            assert re.search(rf"\b{name}\b", text), (script.name, name)
            assert all(default in text for default in defaults), (script.name, name, defaults)
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("script", PYTHON, ids=lambda path: path.name)
def test_python_scripts_answer_help(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert not end.value.code and "usage: " in capsys.readouterr().out
