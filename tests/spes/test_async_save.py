# SPDX-License-Identifier: Apache-2.0
"""A SPES peer whose checkpoints are written beside the run, and that only logs differences when it reads one."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.spes.test_feature import RUN, SPES
from tests.support.slow_writer import ASYNC, at_step, hold_writes, let_write, start_writers_at_once
from tests.sync_service.jobs import SINGLE, die_in_step, failing_job, model_of, run_job, same_bits
from tests.sync_service.service import Service


@pytest.mark.slow
def test_a_peer_resumes_with_the_same_bits(make_service: Callable[..., Service], tmp_path: Path):
    service = make_service({name: {**RUN, "quorum": 1, "grace_seconds": 0.1} for name in ("whole", "killed")})
    service.start()
    folder, gate = tmp_path / "saved", os.fspath(tmp_path / "gate")
    options = {"sync_service_index": 0, **SPES}
    whole = run_job(service, "a", SINGLE, sync_service_run="whole", **options)
    options |= {"sync_service_run": "killed", "save": os.fspath(folder), "save_interval": 5}
    # A step passes between the save and the writing, and none of the server's rounds, behind which a peer must not be.
    before = (start_writers_at_once, partial(hold_writes, gate), partial(at_step, 6, partial(let_write, gate)))
    failing_job(service, "a", SINGLE, before=(*before, die_in_step(7)), **options, **ASYNC)
    again = run_job(service, "a", SINGLE, load=os.fspath(folder), dist_ckpt_strictness="log_all", **options)
    assert same_bits(model_of(again), model_of(whole))
