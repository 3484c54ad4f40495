# SPDX-License-Identifier: Apache-2.0
"""A peer whose checkpoints are written beside the run, and that only logs differences when it reads one."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.support.presets import Options
from tests.support.slow_writer import ASYNC, at_step, hold_writes, let_write, start_writers_at_once
from tests.sync_service.jobs import SINGLE, die_in_step, failing_job, model_of, run_job, same_bits
from tests.sync_service.service import Service

MakeService = Callable[..., Service]


def test_a_peer_resumes_with_the_same_bits(make_service: MakeService, tmp_path: Path):
    runs = {"demo": {"peers": 1}, "again": {"peers": 1}}
    service = make_service(runs)
    service.start()
    folder, gate = os.fspath(tmp_path / "saved"), os.fspath(tmp_path / "gate")
    # The residuals of the first round, after iteration 4, are sent along in the second.
    options: Options = {"sync_service_codec": "int4"}
    undisturbed = model_of(run_job(service, "a", SINGLE, **options))
    options = {**options, "sync_service_run": "again", "save": folder, "save_interval": 5}
    # A step passes between the save and the writing, and none of the server's rounds, behind which a peer must not be.
    before = (start_writers_at_once, partial(hold_writes, gate), partial(at_step, 6, partial(let_write, gate)))
    failing_job(service, "a", SINGLE, before=(*before, die_in_step(7)), **options, **ASYNC)
    resumed = run_job(service, "a", SINGLE, load=folder, dist_ckpt_strictness="log_all", **options)
    assert same_bits(undisturbed, model_of(resumed))
