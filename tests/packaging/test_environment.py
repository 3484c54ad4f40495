# SPDX-License-Identifier: Apache-2.0
"""How scripts/lib/python_env.sh makes .venv, reuses it and recovers; the installations are real."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.machines import Machine

# Each makes environments by pip. CI makes one on a bare machine each time, with the script that is tried here.
pytestmark = pytest.mark.slow

MakeRepository = Callable[[str], Path]


def use(root: Path, then: str = "") -> str:
    """Return the code that sets up the repository and then runs something in its environment."""
    return f'source "{root}/scripts/lib/python_env.sh"\nuse_python_env || exit 1\n{then}'


def test_the_environment_is_made_once_and_its_commands_come_first(
    machine: Machine, make_repository: MakeRepository
) -> None:
    root = make_repository("a folder")
    then = 'command -v python; cd /; python -c "import tiny_module as t; print(t.ANSWER)"'
    done = machine.bash(use(root, then))
    assert done.returncode == 0, done.stdout + done.stderr
    phases = [line.split()[1] for line in done.stdout.splitlines()[:4]]
    assert phases == ["Python", "creating", "installing", "ready"]
    assert done.stdout.splitlines()[-2:] == [f"{root}/.venv/bin/python", "42"]

    again = machine.bash(use(root))
    assert again.returncode == 0
    assert again.stdout.startswith("[set-up] reusing .venv (Python 3.1")
    assert len(again.stdout.splitlines()) == 1


def test_byte_code_is_kept_although_the_caller_forbids_it(machine: Machine, make_repository: MakeRepository) -> None:
    root = make_repository("repo")
    code = 'import tiny_module as t; print(t.__cached__)'
    done = machine.bash(use(root, f'cd /; python -c "{code}"'), PYTHONDONTWRITEBYTECODE="1")
    assert Path(done.stdout.splitlines()[-1]).is_file()


def test_changed_inputs_update_the_environment_in_place(
    machine: Machine, make_repository: MakeRepository
) -> None:
    root = make_repository("repo")
    assert machine.bash(use(root)).returncode == 0
    kept = root / ".venv" / "kept"
    kept.touch()
    for name in ("megatron_ext/extras.py", "constraints.txt"):
        (root / name).write_text((root / name).read_text() + "# changed\n")
        done = machine.bash(use(root))
        assert "megatron_ext/extras.py or constraints.txt changed: updating .venv" in done.stdout
        assert "creating" not in done.stdout
        assert kept.exists()
        assert "reusing" in machine.bash(use(root)).stdout


def test_a_half_made_environment_is_made_again(machine: Machine, make_repository: MakeRepository) -> None:
    root = make_repository("repo")
    # What an interruption leaves behind: at first an empty folder, later an environment without a stamp.
    (root / ".venv").mkdir()
    assert "making it again" in machine.bash(use(root)).stdout
    (root / ".venv" / ".megatron-ext-stamp").unlink()
    (root / ".venv" / "leftover").touch()
    done = machine.bash(use(root, 'cd /; python -c "import tiny_module"'))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "making it again" in done.stdout
    assert not (root / ".venv" / "leftover").exists()
    assert "reusing" in machine.bash(use(root)).stdout


def test_a_moved_or_incomplete_environment_is_recognised(
    machine: Machine, make_repository: MakeRepository
) -> None:
    root = make_repository("repo")
    assert machine.bash(use(root)).returncode == 0

    def is_whole(root: Path, **env: str) -> bool:
        code = f'source "{root}/scripts/lib/python_env.sh"\nif _env_is_whole; then echo whole; fi'
        done = machine.bash(code, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout == "whole\n"

    assert is_whole(root)
    # A copy's programs still start the original's interpreter.
    copy = machine.folder / "copy"
    shutil.copytree(root, copy, symlinks=True)
    assert not is_whole(copy)
    # Another interpreter is asked for than the one it was made with.
    other = machine.python(machine.folder / "elsewhere" / "python3", "3.13.0")
    assert not is_whole(root, MEGATRON_EXT_PYTHON=str(other))
    # Without a wish any complete environment will do.
    assert is_whole(root, MEGATRON_EXT_PYTHON="")
    # The interpreter was uninstalled.
    (root / ".venv" / "bin" / "python").unlink()
    assert not is_whole(root)


def test_a_failed_installation_shows_why_and_leaves_no_stamp(
    machine: Machine, make_repository: MakeRepository
) -> None:
    root = make_repository("repo")
    assert machine.bash(use(root)).returncode == 0
    good = (root / "setup.py").read_text()
    (root / "setup.py").write_text(good.replace('"plots": []', '"plots": ["no-such-package-here"]'))
    done = machine.bash(use(root, "echo REACHED"))
    assert done.returncode == 1
    assert "no-such-package-here" in done.stderr
    assert f"error: pip could not install the packages (whole log: {root}/.venv/install.log)" in done.stderr
    assert "REACHED" not in done.stdout
    assert not (root / ".venv" / ".megatron-ext-stamp").exists()


@pytest.mark.parametrize("file", ["pyvenv.cfg", "conda-meta/history", "notes.txt"])
def test_an_environment_that_someone_else_made_is_left_alone(
    machine: Machine, make_repository: MakeRepository, file: str
) -> None:
    root = make_repository("repo")
    theirs = root / ".venv" / file
    theirs.parent.mkdir(parents=True)
    theirs.write_text("precious\n")
    done = machine.bash(use(root))
    assert done.returncode == 1
    assert f"error: {root}/.venv was made by something else" in done.stderr
    assert "move or remove it" in done.stderr
    assert theirs.read_text() == "precious\n"


def test_a_wrong_override_does_not_cost_the_environment(
    machine: Machine, make_repository: MakeRepository
) -> None:
    root = make_repository("repo")
    assert machine.bash(use(root)).returncode == 0
    done = machine.bash(use(root), MEGATRON_EXT_PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert "MEGATRON_EXT_PYTHON=/nowhere/python does not start" in done.stderr
    assert "reusing" in machine.bash(use(root)).stdout


def test_two_set_ups_at_the_same_time_take_turns(machine: Machine, make_repository: MakeRepository) -> None:
    root = make_repository("repo")
    both = f"""
        ( {use(root)} ) >first.log 2>&1 &
        ( {use(root)} ) >second.log 2>&1 &
        wait -n; wait -n
    """
    done = machine.bash(both)
    logs = [(machine.folder / name).read_text() for name in ("first.log", "second.log")]
    assert done.returncode == 0, logs
    logs.sort(key=lambda text: "waiting for it" in text)
    assert "creating .venv" in logs[0]
    assert "another set-up runs in this checkout: waiting for it" in logs[1]
    assert "reusing .venv" in logs[1]
    assert "creating" not in logs[1]


def test_a_failing_set_up_ends_the_script_that_asked_for_it(
    machine: Machine, make_repository: MakeRepository
) -> None:
    root = make_repository("repo")
    machine.env.pop("MEGATRON_EXT_PYTHON")
    done: subprocess.CompletedProcess[str] = machine.bash(use(root, "echo REACHED"))
    assert done.returncode == 1
    assert "no Python >= 3.12 found" in done.stderr
    assert "REACHED" not in done.stdout
    assert not (root / ".venv").exists()
