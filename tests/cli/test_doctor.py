# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext doctor` tells the truth about this machine, and fails only without a usable Megatron."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

from tests.support.distributed import REPOSITORY
from tests.support.megatron_checkout import python_path


def doctor(*flags, path=()):
    """Run the command with `path` in front of the search path."""
    search_path = os.pathsep.join([*map(os.fspath, path), python_path(REPOSITORY)])
    return subprocess.run(
        [sys.executable, "-m", "megatron_ext.cli.main", "doctor", *flags],
        env={**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def report():
    done = doctor("--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_versions_are_those_that_are_installed(report):
    for name in ("torch", "megatron-core", "numpy"):
        assert report["packages"][name] == metadata.version(name).partition("+")[0] or report["packages"][
            name
        ] == metadata.version(name)
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))


def test_it_says_what_works_and_what_does_not_with_reasons(report):
    import torch

    checks = {check["name"]: check for check in report["checks"]}
    assert checks["Megatron"]["works"] and checks["patches"]["works"] and checks["datasets"]["works"]
    assert checks["GPU + NCCL"]["works"] == torch.cuda.is_available()
    assert report["backend"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert all(check["detail"] for check in report["checks"])
    assert report["gloo"]
    refused = {(entry["option"], entry["ability"]): entry for entry in report["refused"]}
    assert refused["--optimizer-cpu-offload", "local-sgd"]["reason"]
    assert any(entry["option"] == "--use-distributed-optimizer" for entry in report["tested"])


@pytest.mark.slow
def test_another_megatron_is_an_error_that_names_both_versions(tmp_path):
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "package_info.py").write_text('__version__ = "0.21.0+abc"\n')
    done = doctor(path=[tmp_path])
    assert done.returncode == 1
    assert "no     Megatron: megatron-core 0.21.0 is installed, tested are >=0.18,<0.21" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_damaged_package_that_megatron_imports_is_named_instead_of_a_traceback(tmp_path):
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')\n")
    done = doctor(path=[tmp_path])
    assert done.returncode == 1
    assert "Megatron: cannot be imported: OSError: libcudart.so.12" in " ".join(done.stdout.split())
    assert str(package / "__init__.py") in done.stdout
    assert "Traceback" not in done.stderr


def test_a_missing_megatron_is_an_error_that_says_what_to_install(tmp_path):
    # A finder in front of all others stands for an environment without Megatron.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata, sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'megatron' or name.startswith('megatron.'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "found = importlib.metadata.version\n"
        "def version(name):\n"
        "    if name == 'megatron-core':\n"
        "        raise importlib.metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "importlib.metadata.version = version\n"
    )
    done = doctor(path=[tmp_path])
    assert done.returncode == 1, done.stdout
    assert "no     Megatron: not installed; pip install 'megatron-core>=0.18,<0.21'" in done.stdout
    assert "Traceback" not in done.stderr
