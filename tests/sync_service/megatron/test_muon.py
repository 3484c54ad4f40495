# SPDX-License-Identifier: Apache-2.0
"""Peers with Muon inside: on one rank, and layer-wise over two replicas."""

import os
from collections.abc import Callable
from pathlib import Path

from tests.support.presets import Options
from tests.sync_service.jobs import Kind, die_in_step, failing_job, model_of, run_job, same_bits, start_job
from tests.sync_service.service import Service

MakeService = Callable[..., Service]
MUON: Options = {"optimizer": "muon"}
KINDS: list[Kind] = [("single", "bf16", 1), ("dp2", "bf16-distopt", 2)]


def test_peers_end_equal_and_a_killed_one_resumes_with_the_same_bits(make_service: MakeService, tmp_path: Path):
    service = make_service({"demo": {"peers": 2}, "again": {"peers": 1}, "whole": {"peers": 1}})
    service.start()
    jobs = [
        start_job(service, name, kind, sync_service_index=index, **MUON)
        for index, (name, kind) in enumerate(zip("ab", KINDS, strict=True))
    ]
    models = [model_of(job.result()) for job in jobs]
    assert same_bits(*models)
    folder = os.fspath(tmp_path)
    layer_wise = KINDS[1]
    whole = model_of(run_job(service, "a", layer_wise, sync_service_run="whole", sync_service_peers=1, **MUON))
    again: Options = {**MUON, "sync_service_run": "again", "sync_service_peers": 1, "save_interval": 5}
    failing_job(service, "a", layer_wise, before=die_in_step(7), save=folder, **again)
    resumed = model_of(run_job(service, "a", layer_wise, load=folder, **{**again, "save_interval": None}))
    assert same_bits(whole, resumed)
