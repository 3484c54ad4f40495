# SPDX-License-Identifier: Apache-2.0
"""The command itself, whatever it is asked to do."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.distributed import REPOSITORY


def test_ctrl_c_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    # It waits for the text of a pipe that nobody writes to.
    lengths = tmp_path / "lengths"
    os.mkfifo(lengths)
    command = [sys.executable, "-m", "megatron_ext.cli.main", "hot-switch", "suggest", "--model", "llama-7b"]
    command += ["--gpus", "8", "--context", "4096", "--lengths", str(lengths)]
    suggest = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    with lengths.open("w"):  # opened when the command reads
        suggest.send_signal(signal.SIGINT)
        _, said = suggest.communicate(timeout=60)
    assert (suggest.returncode, said) == (130, "megatron-ext: interrupted\n")


def test_the_command_starts_without_torch():
    code = "import sys, megatron_ext.cli.main as cli; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
