# SPDX-License-Identifier: Apache-2.0
"""Peers with workers inside: one upload speaks for all workers, and all take what comes back."""

import functools
import os
import re
from collections.abc import Callable

import numpy as np

from tests.sync_service.jobs import ALONE, die_in_step, failing_job, model_of, run_job, same_bits, start_job
from tests.sync_service.service import Service

MakeService = Callable[..., Service]

WORKERS = {
    "use_local_sgd": True,
    "local_sgd_workers": 2,
    "local_sgd_sync_interval": 2,
    "outer_optimizer": "sgd",
    "outer_optimizer_lr": 0.7,
    "outer_optimizer_momentum": 0.9,
}
TWO_WORKERS = ("single", "bf16-distopt", 2)
NO_MOMENTUM = {"outer_optimizer_momentum": 0.0, "outer_optimizer_nesterov": False}
SERVER = {"outer_optimizer": "sgd", "outer_optimizer_lr": 0.7, "outer_optimizer_momentum": 0.9}


def test_peers_with_and_without_workers_end_with_the_same_bits(make_service: MakeService):
    service = make_service({"demo": {"peers": 2, **SERVER}})
    service.start()
    jobs = [
        start_job(service, "a", ("pp2", "bf16", 4), **WORKERS),
        start_job(service, "b", ("single", "fp32", 1)),
    ]
    # `model_of` sees to it that all workers of a job hold the same bits.
    first, second = (model_of(job.result()) for job in jobs)
    assert same_bits(first, second)
    uploads = {event["peer"]: event["bytes"] for event in service.events("uploaded") if event["round"] == 1}
    assert uploads["a"] == uploads["b"]


def test_workers_continue_from_what_a_round_of_peers_gives(make_service: MakeService):
    service = make_service({"demo": {"peers": 1, "outer_optimizer": "sgd", "outer_optimizer_lr": 0.5, **NO_MOMENTUM}})
    service.start()
    fp32 = ("single", "fp32", 2)
    plain = {**WORKERS, **NO_MOMENTUM, "sync_service_interval": 2}
    # The server takes half of what the workers' rounds have come to, as an outer learning rate half as large does. It
    # is not 1, with which the anchor would not matter.
    halved = model_of(run_job(service, "a", fp32, **{**plain, "outer_optimizer_lr": 0.8}))
    expected = model_of(run_job(service, "a", fp32, **{**plain, "outer_optimizer_lr": 0.4, **ALONE}))
    for name, values in expected.items():
        # Sums are rounded in another order; a key's bias has nothing but rounding errors for a gradient.
        tolerance = 1e-4 if name.endswith("linear_qkv.bias") else 1e-6
        np.testing.assert_allclose(halved[name], values, rtol=0, atol=tolerance, err_msg=name)


def test_a_killed_peer_with_workers_resumes_in_mid_interval_without_a_changed_bit(make_service: MakeService, tmp_path):
    service = make_service({"demo": {"peers": 1, **SERVER}, "again": {"peers": 1, **SERVER}})
    service.start()
    # The codecs' residuals of the first round, of the peers and of the workers inside, are sent along in the second.
    options = {**WORKERS, "sync_service_codec": "int4", "local_sgd_codec": "int8"}
    undisturbed = model_of(run_job(service, "a", TWO_WORKERS, **options))
    options |= {"save": os.fspath(tmp_path), "save_interval": 5, "sync_service_run": "again"}
    failing_job(service, "a", TWO_WORKERS, before=die_in_step(6), **options)
    resumed = run_job(service, "a", TWO_WORKERS, load=os.fspath(tmp_path), **options)
    assert "1 steps after round 1" in resumed[0].stdout
    assert same_bits(undisturbed, model_of(resumed))
    # At the end of training the peer has left, and its checkpoint begins whatever follows.
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    said = failing_job(
        service, "a", TWO_WORKERS, **{**options, "load": os.fspath(tmp_path), "sync_service_codec": "int8"}
    )
    assert "it was saved with --sync-service-codec int4, now it is int8" in said


def test_workers_that_stand_apart_meet_before_a_job_becomes_a_peer(make_service: MakeService, tmp_path):
    service = make_service({"demo": {"peers": 1, **SERVER}})
    service.start()
    options = {**WORKERS, "save": os.fspath(tmp_path), "save_interval": 5}
    # Its last checkpoint is in the middle of an interval.
    alone = run_job(service, "a", ("single", "fp32", 2), **{**options, **ALONE, "exit_interval": 5})
    assert len({ranks.losses[-1] for ranks in alone}) == 2  # they have trained apart
    joined = run_job(service, "a", ("single", "fp32", 2), load=os.fspath(tmp_path), **options)
    met = "the workers meet 1 step into their interval, for the job's round with its peers"
    assert met in joined[0].stdout and "0 steps after round 0" in joined[0].stdout
    assert joined[0].stdout.index(met) < joined[0].stdout.index("0 steps after round 0")
    # To meet is to take the mean of all, no round.
    assert "local SGD: resumed after round 2, 0 steps into the interval" in joined[0].stdout


def test_workers_that_stand_apart_meet_for_the_peers_round(make_service: MakeService, tmp_path):
    service = make_service({"demo": {"peers": 1, **SERVER}})
    service.start()
    options = {"save": os.fspath(tmp_path), "save_interval": 5}
    failing_job(service, "a", ("single", "fp32", 2), before=die_in_step(5), **options)
    # The workers' first interval begins with the fifth step, and the peers' ends with the eighth.
    resumed = run_job(service, "a", ("single", "fp32", 2), load=os.fspath(tmp_path), **WORKERS, **options)
    assert "the workers meet 1 step into their interval, for the job's round with its peers" in resumed[0].stdout
    assert len({ranks.losses[-1] for ranks in resumed}) == 2  # they have trained apart
    model_of(resumed)


def count_steps() -> None:
    """Before: say which steps are none of warm-up."""
    from megatron.training import get_args

    from megatron_ext.local_sgd.engine import LocalSGD

    original = LocalSGD.count_step

    @functools.wraps(original)
    def count_step(self):
        print(f"step {get_args().curr_iteration} is a worker's own")
        return original(self)

    LocalSGD.count_step = count_step


def test_workers_that_go_back_are_not_in_warm_up_again(make_service: MakeService, tmp_path):
    service = make_service(quorum=1, grace_seconds=0.2)
    service.start()
    kind, options = ("single", "fp32", 2), {"sync_service_interval": 4}
    own = {**options, **WORKERS, "local_sgd_warmup_steps": 2, "sync_service_index": 1}
    failing_job(service, "b", kind, before=die_in_step(3), save=str(tmp_path), save_interval=3, **own)
    run_job(service, "a", ("single", "fp32", 1), sync_service_index=0, **options)
    # Each worker has moments of its own by then, which would make them differ.
    again = run_job(service, "b", kind, before=count_steps, load=str(tmp_path), **own)
    assert "resumes at iteration 0, because" in again[0].stdout
    assert re.findall(r"step (\d) is a worker's own", again[0].stdout) == [str(step) for step in range(8)]
    model_of(again)


def test_a_checkpoint_of_such_workers_is_taken_again(make_service: MakeService, tmp_path):
    service = make_service(quorum=1, grace_seconds=0.2)
    service.start()
    kind, options = ("single", "fp32", 2), {"sync_service_interval": 4}
    own = {**options, **WORKERS, "local_sgd_warmup_steps": 2, "sync_service_index": 1, "save": str(tmp_path)}
    failing_job(service, "b", kind, before=die_in_step(3), save_interval=3, **own)
    run_job(service, "a", ("single", "fp32", 1), sync_service_index=0, **options)
    own["load"] = str(tmp_path)
    failing_job(service, "b", kind, before=die_in_step(1), save_interval=1, **own)
    again = run_job(service, "b", kind, save_interval=100, **own)
    assert [step.iteration for step in again[0].record.steps] == list(range(2, 9))
