# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that another release of Megatron has made resumes on the installed one.

`./tests/run.sh --megatron-release 0.18.2` installs that release beside the environment's.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.presets import PRECISIONS, toy_gpt

REPOSITORY = Path(__file__).parents[2]
EARLIER = REPOSITORY / ".venv/megatron-0.18.2"
LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def train(options, *before):
    """Train in processes that look for Megatron in the folders `before` first; return losses and gradient norms."""
    folders = os.pathsep.join(map(os.fspath, (*before, REPOSITORY)))
    run = subprocess.run(
        [*LAUNCH, "examples/pretrain_gpt.py", *toy_gpt(PRECISIONS["bf16-distopt"], options)],
        env={**os.environ, "PYTHONPATH": folders},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [re.findall(rf"\| {name}: (\S+)", run.stdout) for name in ("lm loss", "grad norm")]


@pytest.mark.slow
@pytest.mark.skipif(not EARLIER.exists(), reason="needs ./tests/run.sh --megatron-release 0.18.2")
@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_checkpoint_of_an_earlier_release_resumes_where_that_release_would(tmp_path, form):
    options, folder = {"ckpt_format": form}, os.fspath(tmp_path)
    losses, norms = train({**options, "save": folder, "save_interval": 2}, EARLIER)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed_losses, resumed_norms = train({**options, "load": folder})
    assert len(set(losses)) == 4 and resumed_norms == norms[2:]
    # The second line of a resumed run has the mean of two iterations.
    assert resumed_losses[0] == losses[2]
