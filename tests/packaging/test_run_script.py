# SPDX-License-Identifier: Apache-2.0
"""What tests/run.sh and .ci/run promise, in a small repository with the real tools."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.machines import ROOT

TESTS = '''\
"""Two tests."""

import pytest


def test_quick() -> None:
    assert True


@pytest.mark.slow
def test_slow() -> None:
    assert True
'''

PYPROJECT = """\
[tool.mypy]
files = ["package"]
disallow_untyped_defs = true

[tool.pytest.ini_options]
markers = ["slow: slow"]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("tests/run.sh", ".ci/run"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    # The environment that runs this test stands in for .venv: setting it up is test_environment.py's matter.
    (tmp_path / "scripts/lib").mkdir(parents=True)
    (tmp_path / "scripts/lib/python_env.sh").write_text(
        f'use_python_env() {{ export PATH="{Path(sys.executable).parent}:$PATH"; }}\n'
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("VALUE: int = 1\n")
    (tmp_path / "tests" / "test_two.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    return tmp_path


def run(repository: Path, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    # From another folder, as CI may; without the outer pytest's variables, which would reach the inner one.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        ["bash", str(repository / script), *args],
        cwd="/",
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )


def test_ci_leaves_out_the_slow_tests_alone_and_ends_with_pytests_summary(repository: Path) -> None:
    done = run(repository, ".ci/run")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_all_runs_the_slow_tests_too(repository: Path) -> None:
    done = run(repository, "tests/run.sh", "--all")
    assert done.returncode == 0, done.stdout
    assert "= 2 passed in" in done.stdout.splitlines()[-1]


def test_further_arguments_reach_pytest_with_paths_from_the_root(repository: Path) -> None:
    done = run(repository, "tests/run.sh", "tests/test_two.py", "-k", "quick or nothing")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 deselected" in done.stdout.splitlines()[-1]


def test_a_failing_test_fails_the_run(repository: Path) -> None:
    (repository / "tests" / "test_bad.py").write_text(
        "def test_bad() -> None:\n    assert len(__name__) == 0\n"
    )
    done = run(repository, "tests/run.sh")
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout.splitlines()[-1]


def test_running_no_test_is_a_failure(repository: Path) -> None:
    done = run(repository, "tests/run.sh", "-k", "no_such_test")
    assert done.returncode == 5
    assert "failed: no test was selected" in done.stdout


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        ("ruff mypy", "import os\ndef untyped(x):\n    return x\n"),
        pytest.param("ruff", "import os\n", marks=pytest.mark.slow),
        pytest.param("mypy", "def untyped(x):\n    return x\n", marks=pytest.mark.slow),
    ],
    ids=["both", "ruff", "mypy"],
)
def test_a_complaint_of_a_checker_fails_the_run_after_the_tests(
    repository: Path, tools: str, complaint: str
) -> None:
    (repository / "package" / "more.py").write_text(complaint)
    done = run(repository, "tests/run.sh")
    assert done.returncode == 1
    assert "1 passed" in done.stdout
    assert f"failed in addition to the tests: {tools} (see above)" in done.stdout


def test_a_failing_set_up_stops_before_the_checks(repository: Path) -> None:
    (repository / "scripts/lib/python_env.sh").write_text("use_python_env() { return 1; }\n")
    done = run(repository, ".ci/run")
    assert done.returncode == 1
    assert "[check]" not in done.stdout
