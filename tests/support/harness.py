# SPDX-License-Identifier: Apache-2.0
"""An environment that has lm-evaluation-harness.

The harness brings some fifty packages, which only evaluation needs: they are not installed for the quickstart and the
rest of the tests, but once into `.venv/lm-eval`, at the versions of constraints.txt.
"""

import fcntl
import importlib.util
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from megatron_ext.extras import EXTRAS
from tests.support.distributed import REPOSITORY

__all__ = ["harness_path"]

FOLDER = REPOSITORY / ".venv" / "lm-eval"


def harness_path() -> str:
    """Return the folder whose `python` has lm-evaluation-harness, beside all that this one has."""
    if importlib.util.find_spec("lm_eval"):
        return str(Path(sys.executable).parent)
    FOLDER.parent.mkdir(exist_ok=True)
    with (FOLDER.parent / "lm-eval.lock").open("w") as lock:
        # Tests of several files run at the same time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        constraints = (REPOSITORY / "constraints.txt").read_text()
        stamp = FOLDER / "stamp"
        wanted = f"{sys.prefix} {EXTRAS['eval']}\n{constraints}"
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(FOLDER, ignore_errors=True)
            _install()
            stamp.write_text(wanted)
    return str(FOLDER / "bin")


def _install() -> None:
    venv.create(FOLDER, with_pip=True)
    (packages,) = FOLDER.glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    constraints = str(REPOSITORY / "constraints.txt")
    install = [FOLDER / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile", "-c", constraints]
    subprocess.run([*install, *EXTRAS["eval"]], check=True, timeout=1200, stdin=subprocess.DEVNULL)
