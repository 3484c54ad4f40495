# SPDX-License-Identifier: Apache-2.0
"""All peers of a run go back to older checkpoints: under the run's name, and under another one."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.sync_service.jobs import SINGLE, model_of, remember_samples, same_bits, samples_of, start_job
from tests.sync_service.service import Service

MakeService = Callable[..., Service]
SGD = {"outer_optimizer": "sgd", "outer_optimizer_lr": 0.7, "outer_optimizer_momentum": 0.9}
SCHEDULE = {"train_iters": 16, "save_interval": 6}


def peers(service: Service, folder: Path, *, back: bool, run: str = "demo", **options: object):
    """Run both peers to their end, from nothing or back from what they saved after 6 of 16 steps."""
    jobs = []
    for index, name in enumerate("ab"):
        saved = str(folder / name)
        loaded = {"load": saved, "ckpt_step": 6, "save": f"{saved}-again"} if back else {"save": saved}
        more = {**SCHEDULE, **loaded, "sync_service_index": index, "sync_service_run": run, **options}
        jobs.append(start_job(service, name, SINGLE, before=remember_samples, **more))
    return [job.result() for job in jobs]


@pytest.fixture
def service(make_service: MakeService, tmp_path: Path) -> Service:
    """A run that was told to exit after three rounds, and another one that has not begun."""
    found = make_service({name: {"peers": 2, **SGD} for name in ("demo", "another")})
    found.start()
    peers(found, tmp_path, back=False, exit_interval=12)
    return found


def rounds(service: Service, run: str = "demo") -> list[tuple[int, str]]:
    return [(event["round"], event["digest"]) for event in service.events("committed", run=run)]


def test_under_the_runs_name_they_resume_from_its_newest_round(service: Service, tmp_path: Path):
    committed = rounds(service)
    assert [number for number, _ in committed] == [0, 1, 2, 3]
    ended = peers(service, tmp_path, back=True)
    for rank in (ended[0][0], ended[1][0]):
        assert "resumes at iteration 12, because 6 steps that this peer had made after iteration 6 were" in rank.stdout
        assert "0 steps after round 3" in rank.stdout
    assert rounds(service)[:4] == committed
    assert [number for number, _ in rounds(service)] == [0, 1, 2, 3, 4]
    assert same_bits(model_of(ended[0]), model_of(ended[1]))
    assert sorted(samples_of(ended[0]) + samples_of(ended[1])) == list(range(96, 128))


def test_under_another_name_they_begin_with_the_first_ones_weights(service: Service, tmp_path: Path):
    ended = peers(service, tmp_path, back=True, run="another", sync_service_interval=5)
    assert [number for number, _ in rounds(service, "another")] == [0, 1, 2]
    models = [model_of(job) for job in ended]
    assert same_bits(*models)
    assert all(np.isfinite(values).all() for values in models[0].values())
    assert sorted(samples_of(ended[0]) + samples_of(ended[1])) == list(range(48, 128))
    assert len(rounds(service)) == 4
