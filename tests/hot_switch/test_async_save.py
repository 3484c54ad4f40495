# SPDX-License-Identifier: Apache-2.0
"""Hot switching with checkpoints that are written beside the run, and with readers that only log differences."""

import os
from functools import partial

import pytest

from tests.hot_switch.runs import arguments, assert_resumed, full_parameters, hot_run
from tests.support.pretrain import run_pretrain
from tests.support.slow_writer import ASYNC, at_step, hold_writes, open_gate, start_writers_at_once

HOT = (["1,2,1", "2,1,1", "1,1,2"], [32, 16, 8, 0])
OPTIONS = {"bf16": True, "use_distributed_optimizer": True, "hidden_dropout": 0.1, "train_iters": 4}


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    folder, gate = os.fspath(tmp_path / "saved"), os.fspath(tmp_path / "gate")
    saving = arguments(*HOT, **OPTIONS, **ASYNC, save=folder, save_interval=2)
    # Switches, and all weights and moments change, before anything is written.
    before = (start_writers_at_once, partial(hold_writes, gate), partial(at_step, 3, partial(open_gate, gate)))
    through = run_pretrain(saving, 2, before=before, probe=full_parameters)
    reading = {"load": folder, "ckpt_step": 2, "dist_ckpt_strictness": "log_all"}
    assert_resumed(hot_run(*HOT, **OPTIONS, **reading), through, after=2)
