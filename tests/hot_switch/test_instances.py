# SPDX-License-Identifier: Apache-2.0
"""Home's distributed optimizer has several instances (`--num-distributed-optimizer-instances`)."""

import os
from pathlib import Path

import pytest

from tests.hot_switch.runs import assert_resumed, hot_run, losses

HOT = (["4,1,1", "2,2,1"], [32, 12, 0])
TOLERANCE = 1e-5


def test_two_instances_compute_what_one_has_and_resume_with_the_same_bits(tmp_path: Path):
    options = {"use_distributed_optimizer": True, "train_iters": 4, "overlap_grad_reduce": True}
    one = hot_run(*HOT, **options)
    options["num_distributed_optimizer_instances"] = 2
    two = hot_run(*HOT, **options, save=os.fspath(tmp_path), save_interval=2)
    assert len(set(losses(two))) == 4
    assert losses(two) == pytest.approx(losses(one), abs=TOLERANCE)
    norms = [[step.grad_norm for step in run[0].record.steps] for run in (two, one)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert_resumed(hot_run(*HOT, **options, load=os.fspath(tmp_path)), two, after=2)
