# SPDX-License-Identifier: Apache-2.0
"""How an error that the user can put right is reported by a job of several processes."""

import subprocess
import sys

import pytest

from megatron_ext.errors import combine
from tests.support.distributed import REPOSITORY

SCRIPT = """
import os, sys, time
sys.path.insert(0, {root!r})
from megatron_ext.errors import UserError, report
if os.environ["RANK"] in {failing}:
    report(UserError("--flag is wrong"))
    sys.exit(2)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("failing", "said"),
    [("01", "megatron-ext: error: --flag is wrong"), ("1", "megatron-ext: error on rank 1: --flag is wrong")],
    ids=["everywhere", "on one rank"],
)
def test_an_error_is_said_once_wherever_it_happens(tmp_path, failing, said):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(REPOSITORY), failing=tuple(failing)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if "megatron-ext" in line] == [said]


def test_all_problems_are_listed_under_one_heading():
    assert str(combine(["--a is wrong"], "arguments")) == "arguments: --a is wrong"
    assert str(combine(["a", "b"], "arguments")).splitlines() == ["arguments: 2 problems", "  1. a", "  2. b"]
