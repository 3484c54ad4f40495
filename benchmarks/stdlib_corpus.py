# SPDX-License-Identifier: Apache-2.0
"""The text that the studies train on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.distributed import REPOSITORY

__all__ = ["tokenize_stdlib"]


def tokenize_stdlib(prefix: Path) -> None:
    """Tokenize the source code of Python's standard library, unless that was done.

    Args:
        prefix: of the .bin and .idx.

    Raises:
        CalledProcessError: it failed, and has said why.
    """
    command = [sys.executable, "-m", "megatron_ext.cli.main", "data", "prepare", "--stdlib"]
    command += ["--output-prefix", str(prefix), "--reuse", "--overwrite"]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
