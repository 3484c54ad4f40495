# SPDX-License-Identifier: Apache-2.0
"""The published atorch in a virtual environment of its own: a part of vs_atorch.py.

Only atorch and what it needs to be imported are installed there. torch is that of this Python, so that both sides
run on the same torch, in the same processes and over the same process group.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from megatron_ext.errors import UserError

__all__ = ["RELEASE", "install", "installed"]

RELEASE = "0.2.5"
# Its metadata ask for dlrover, transformers, pandas and more, which local SGD does not import.
REQUIREMENTS = (f"atorch=={RELEASE}", "grpcio")
# This Python's pip: to put one into every environment takes longer than all the rest.
PIP = (sys.executable, "-m", "pip")
TAIL_LINES = 8


def install(folder: Path) -> Path:
    """Make the environment, unless it is there, and return the folder of its packages.

    Args:
        folder: of the environment.

    Raises:
        UserError: it cannot be made, or what is in it cannot be imported beside this torch.
    """
    if not installed(folder):
        print(f"installing atorch {RELEASE} into {folder}", flush=True)
        try:
            venv.create(folder)
        except OSError as error:
            raise UserError(f"--env {folder}: no virtual environment can be made there: {error}") from error
        _run(
            [*PIP, "--python", str(folder / "bin" / "python"), "install", "--no-deps", *REQUIREMENTS],
            f"--env {folder}: {' and '.join(REQUIREMENTS)} cannot be installed there; the first start needs a package "
            "index that pip reaches",
        )
    packages = _packages(folder)
    _run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(packages)!r}); import atorch.local_sgd.DDP"],
        f"--env {folder}: the atorch in it cannot be imported beside the torch of {sys.executable}; if the folder is "
        "of another Python, or damaged, remove it",
    )
    return packages


def installed(folder: Path) -> bool:
    """Return whether `install` has nothing to install in this folder."""
    packages = _packages(folder)
    return (packages / f"atorch-{RELEASE}.dist-info").is_dir() and (packages / "grpc").is_dir()


def _packages(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))


def _run(command: list[str], problem: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "".join(f"\n    {line}" for line in done.stderr.rstrip().splitlines()[-TAIL_LINES:])
        raise UserError(f"{problem}. It said:{tail}")
