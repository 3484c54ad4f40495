# SPDX-License-Identifier: Apache-2.0
"""A SPES peer whose checkpoints are in Megatron's legacy format (`--ckpt-format torch`)."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.spes.test_feature import MODEL, RUN, SPES
from tests.support.pretrain import run_pretrain
from tests.sync_service.jobs import ALONE, Kind, die_in_step, failing_job, job_arguments, model_of, run_job, same_bits
from tests.sync_service.service import Service

LEGACY = {"ckpt_format": "torch"}


# Of two ranks of a peer that trains experts 0 and 1 contiguously, one has none of them to train.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "assignment"),
    [
        pytest.param(("single", "fp32", 1), "interleaved", id="one rank"),
        pytest.param(("moe-ep2", "bf16-distopt", 2), "contiguous", id="a rank without experts"),
    ],
)
def test_a_killed_peer_resumes_with_the_same_bits(
    make_service: Callable[..., Service], tmp_path: Path, kind: Kind, assignment: str
):
    service = make_service({name: {**RUN, "quorum": 1, "grace_seconds": 0.1} for name in ("whole", "killed")})
    service.start()
    folder = os.fspath(tmp_path / "saved")
    options = {"sync_service_index": 0, **SPES, **LEGACY, "spes_expert_assignment": assignment}
    whole = run_job(service, "a", kind, sync_service_run="whole", **options)
    options |= {"sync_service_run": "killed", "save": folder, "save_interval": 5}
    failing_job(service, "a", kind, before=die_in_step(7), **options)
    again = run_job(service, "a", kind, load=folder, **options)
    assert same_bits(model_of(again), model_of(whole))


def test_an_optimizer_that_trained_all_experts_is_refused(make_service: Callable[..., Service], tmp_path: Path):
    service = make_service({"demo": RUN})
    service.start()
    folder = os.fspath(tmp_path)
    alone = {**ALONE, **MODEL, **LEGACY, "train_iters": 1, "save": folder, "save_interval": 1}
    run_pretrain(job_arguments(service, "a", ("single", "fp32", 1), **alone), 1)
    said = failing_job(service, "a", ("single", "fp32", 1), sync_service_index=0, **SPES, **LEGACY, load=folder)
    assert "its optimizer trained all experts, this peer trains some" in said
    assert "without --ckpt-format torch" in said
    assert "Traceback" not in said
