# SPDX-License-Identifier: Apache-2.0
"""A peer whose checkpoints are in Megatron's legacy format (`--ckpt-format torch`), or are converted to and from it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.presets import Options
from tests.support.pretrain import run_pretrain
from tests.sync_service.jobs import Kind, die_in_step, failing_job, job_arguments, model_of, run_job, same_bits
from tests.sync_service.megatron.test_workers import TWO_WORKERS, WORKERS
from tests.sync_service.service import Service

MakeService = Callable[..., Service]


@pytest.mark.parametrize(
    ("kind", "extra", "saved_at"),
    [
        # The residuals of the first round, after iteration 4, are sent along in the second.
        pytest.param(("dp2", "bf16-distopt", 2), {"sync_service_codec": "int4"}, 5, id="replicas"),
        pytest.param(
            TWO_WORKERS, {**WORKERS, "local_sgd_sync_interval": 2}, 5, id="workers", marks=pytest.mark.slow
        ),
    ],
)
def test_a_killed_peer_resumes_with_the_same_bits(
    make_service: MakeService, tmp_path: Path, kind: Kind, extra: Options, saved_at: int
):
    service = make_service({"demo": {"peers": 1}, "again": {"peers": 1}})
    service.start()
    folder = os.fspath(tmp_path / "saved")
    options: Options = {**extra, "ckpt_format": "torch"}
    undisturbed = model_of(run_job(service, "a", kind, **options))
    options = {**options, "sync_service_run": "again", "save": folder, "save_interval": saved_at}
    failing_job(service, "a", kind, before=die_in_step(7), **options)
    resumed = run_job(service, "a", kind, load=folder, **options)
    assert same_bits(undisturbed, model_of(resumed))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("torch_dist", "torch"), ("torch", "torch_dist")])
def test_a_killed_peer_resumes_from_a_converted_checkpoint_with_the_same_bits(
    make_service: MakeService, tmp_path: Path, before: str, after: str
):
    service = make_service({"demo": {"peers": 1}, "again": {"peers": 1}})
    service.start()
    kind: Kind = ("dp2", "bf16-distopt", 2)
    first, second = (os.fspath(tmp_path / name) for name in ("first", "second"))
    options: Options = {"sync_service_codec": "int4", "ckpt_format": before}
    undisturbed = model_of(run_job(service, "a", kind, **options))
    options = {**options, "sync_service_run": "again"}
    failing_job(service, "a", kind, before=die_in_step(7), save=first, save_interval=5, **options)
    converting: Options = {**options, "load": first, "ckpt_convert_format": after, "ckpt_convert_save": second}
    converted = run_pretrain(job_arguments(service, "a", kind, **converting), 2)
    assert converted[0].losses == [] and f"converted checkpoint: {before} -> {after}" in converted[0].stdout
    # Megatron names the folder after the format.
    resumed = run_job(service, "a", kind, **{**options, "ckpt_format": after, "load": f"{second}/{after}"})
    assert len(resumed[0].record.steps) == 3
    assert same_bits(undisturbed, model_of(resumed))


def test_residuals_that_are_not_there_are_refused_by_the_name_of_their_file(make_service: MakeService, tmp_path: Path):
    service = make_service({"demo": {"peers": 1}})
    service.start()
    options: Options = {"sync_service_codec": "int4", "ckpt_format": "torch", "train_iters": 6}
    folder = os.fspath(tmp_path)
    failing_job(service, "a", ("single", "fp32", 1), before=die_in_step(5), save=folder, save_interval=5, **options)
    (residuals,) = tmp_path.glob("iter_0000005/sync_service_residuals_*.pt")
    residuals.unlink()
    said = failing_job(service, "a", ("single", "fp32", 1), load=folder, **options)
    assert f"{residuals}, this rank's residuals of the codec, cannot be read" in said
    assert "Traceback" not in said
