# SPDX-License-Identifier: Apache-2.0
"""Which interpreter scripts/lib/python_env.sh chooses, on stand-in machines."""

import subprocess
import sys
from pathlib import Path

from tests.packaging.machines import ROOT, Machine, script

FIND = f'source "{ROOT}/scripts/lib/python_env.sh"\nfind_python\necho "CHOSEN $PYTHON_ENV_BASE"'
# What a pyenv shim of a version that is not selected does.
FAILING_SHIM = 'echo "pyenv: $0: command not found" >&2\nexit 127'


def chosen(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1].removeprefix("CHOSEN ")


def test_python312_on_the_path_is_used(machine: Machine) -> None:
    python = machine.python(machine.bin / "python3.12", "3.12.4")
    done = machine.bash(FIND)
    assert chosen(done) == str(python)
    assert "[set-up] Python 3.12.4: " in done.stdout


def test_a_shim_that_does_not_start_is_passed_over(machine: Machine) -> None:
    script(machine.bin / "python3.12", FAILING_SHIM)
    python = machine.python(machine.folder / "other" / "python3.12", "3.12.4")
    assert chosen(machine.bash(FIND, PATH=f"{machine.bin}:{python.parent}")) == str(python)


def test_a_pyenv_version_is_found_behind_its_failing_shim(machine: Machine) -> None:
    script(machine.bin / "python3.12", FAILING_SHIM)
    machine.python(machine.bin / "python3", "3.11.7")
    python = machine.python(machine.folder / "pyenv/versions/3.12.1/bin/python3", "3.12.1")
    assert chosen(machine.bash(FIND, PYENV_ROOT=str(machine.folder / "pyenv"))) == str(python)


def test_pyenv_in_the_home_folder_is_found_without_its_command(machine: Machine) -> None:
    python = machine.python(machine.home / ".pyenv/versions/3.12.1/bin/python3", "3.12.1")
    assert chosen(machine.bash(FIND)) == str(python)


def test_the_pyenv_command_tells_where_its_versions_are(machine: Machine) -> None:
    script(machine.bin / "pyenv", f'[ "$1" = root ] && echo "{machine.folder}/elsewhere"')
    python = machine.python(machine.folder / "elsewhere/versions/3.12.1/bin/python3", "3.12.1")
    assert chosen(machine.bash(FIND)) == str(python)


def test_uv_is_asked_last(machine: Machine) -> None:
    managed = machine.python(machine.folder / "managed/python3.12", "3.12.9")
    # Unless it is told to look at its own only, uv gives up at a failing shim on the PATH.
    script(
        machine.bin / "uv",
        f'[ "$4 $UV_PYTHON_PREFERENCE" = "3.12 only-managed" ] || exit 2\necho "{managed}"',
    )
    script(machine.bin / "python3.12", FAILING_SHIM)
    assert chosen(machine.bash(FIND)) == str(managed)
    on_path = machine.python(machine.bin / "python3.12", "3.12.4")
    assert chosen(machine.bash(FIND)) == str(on_path)


def test_312_is_preferred_to_313_and_both_to_newer_ones_wherever_they_are(machine: Machine) -> None:
    machine.python(machine.bin / "python3", "3.14.0")
    newer = machine.python(machine.home / ".pyenv/versions/3.13.0/bin/python3", "3.13.0")
    assert chosen(machine.bash(FIND)) == str(newer)
    machine.python(machine.bin / "python3.13", "3.13.0")
    tested = machine.python(machine.home / ".pyenv/versions/3.12.1/bin/python3", "3.12.1")
    assert chosen(machine.bash(FIND)) == str(tested)


def test_a_newer_python_is_used_with_a_note_when_it_is_the_only_one(machine: Machine) -> None:
    python = machine.python(machine.bin / "python3", "3.14.0")
    done = machine.bash(FIND)
    assert chosen(done) == str(python)
    assert "note: tested with Python 3.12 and 3.13" in done.stdout


def test_a_python_without_its_venv_module_is_passed_over(machine: Machine) -> None:
    machine.python(machine.bin / "python3.12", "3.12.4", without="ensurepip")
    done = machine.bash(FIND)
    assert done.returncode == 1
    assert f"{machine.bin}/python3.12 is Python 3.12.4 without its venv module" in done.stderr


def test_the_interpreter_behind_a_virtual_environment_is_used(machine: Machine) -> None:
    environment = machine.folder / "someones-venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60)
    found = chosen(machine.bash(FIND, PATH=f"{machine.bin}:{environment}/bin"))
    assert Path(found).resolve() == Path(sys.executable).resolve()
    assert not found.startswith(str(environment))


def test_the_override_wins_over_a_better_one(machine: Machine) -> None:
    machine.python(machine.bin / "python3.12", "3.12.4")
    wanted = machine.python(machine.folder / "mine/python", "3.13.0")
    done = machine.bash(FIND, MEGATRON_EXT_PYTHON=str(wanted))
    assert chosen(done) == str(wanted)
    assert "(MEGATRON_EXT_PYTHON)" in done.stdout


def test_the_override_may_be_a_command_name(machine: Machine) -> None:
    machine.python(machine.bin / "python3.12", "3.12.4")
    wanted = machine.python(machine.bin / "python3.13", "3.13.0")
    assert chosen(machine.bash(FIND, MEGATRON_EXT_PYTHON="python3.13")) == str(wanted)


def test_an_override_that_does_not_work_is_an_error_not_a_hint(machine: Machine) -> None:
    machine.python(machine.bin / "python3.12", "3.12.4")
    old = machine.python(machine.folder / "old/python", "3.11.7")
    shim = script(machine.folder / "shim/python", FAILING_SHIM)
    other = script(machine.folder / "other/python", "echo hello")
    for override, problem in (
        (str(machine.folder / "missing"), "does not start"),
        (str(shim), "does not start"),
        (str(other), "is not Python"),
        (str(old), "is Python 3.11.7"),
    ):
        done = machine.bash(FIND, MEGATRON_EXT_PYTHON=override)
        assert done.returncode == 1
        assert f"MEGATRON_EXT_PYTHON={override} {problem}; it must name a working" in done.stderr
        assert "CHOSEN" not in done.stdout


def test_none_found_says_what_was_tried_and_three_ways_to_install_one(machine: Machine) -> None:
    script(machine.bin / "python3.12", FAILING_SHIM)
    machine.python(machine.bin / "python3", "3.11.7")
    script(machine.bin / "python", "exit 2")
    done = machine.bash(FIND)
    assert done.returncode == 1
    assert "error: no Python >= 3.12 found" in done.stderr
    assert f"{machine.bin}/python3.12 does not start" in done.stderr
    assert f"{machine.bin}/python3 is Python 3.11.7" in done.stderr
    for way in ("apt-get install python3.12", "pyenv install 3.12", "uv python install 3.12"):
        assert way in done.stderr
    assert "MEGATRON_EXT_PYTHON=" in done.stderr


def test_a_machine_without_any_python_gets_the_same_message(machine: Machine) -> None:
    done = machine.bash(FIND)
    assert done.returncode == 1
    assert "error: no Python >= 3.12 found" in done.stderr
    assert "Tried:" not in done.stderr


def test_an_unset_home_is_not_a_problem(machine: Machine) -> None:
    python = machine.python(machine.folder / "pyenv/versions/3.12.1/bin/python3", "3.12.1")
    assert chosen(machine.bash("unset HOME\n" + FIND, PYENV_ROOT=str(machine.folder / "pyenv"))) == str(
        python
    )
