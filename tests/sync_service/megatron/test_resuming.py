# SPDX-License-Identifier: Apache-2.0
"""A peer resumes where its part of the samples is trained up to, whoever had its place and whatever it loads."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.sync_service.channel.connection import Connection, ConnectionConfig
from megatron_ext.sync_service.protocol.protocol import pb2
from tests.support.presets import Options
from tests.support.waiting import until
from tests.sync_service.jobs import (
    SINGLE,
    die_in_step,
    failing_job,
    model_of,
    remember_samples,
    run_job,
    same_bits,
    samples_of,
    start_job,
)
from tests.sync_service.service import Service

MakeService = Callable[..., Service]
PART = list(range(1, 96, 2))
"""What part 1 of 2 has of 12 steps of 2 x 4 samples."""


def evict(service: Service, name: str) -> None:
    """End the membership of a peer whose process was killed."""
    connection = Connection(ConnectionConfig(server=service.address))
    connection.call("Evict", pb2.EvictRequest(run="demo", peer=name, reason="gone"))
    connection.close()


def test_a_peer_that_comes_back_leaves_out_what_another_one_has_trained_in_its_place(
    make_service: MakeService, tmp_path: Path
):
    service = make_service(rounds="asynchronous")
    service.start()
    options: Options = {"train_iters": 12, "sync_service_interval": 2, "sync_service_index": 1}
    failing_job(service, "b", SINGLE, before=die_in_step(3), save=str(tmp_path), save_interval=3, **options)
    evict(service, "b")
    failing_job(service, "c", SINGLE, before=die_in_step(5), **options)
    evict(service, "c")
    again = run_job(service, "b", SINGLE, before=remember_samples, load=str(tmp_path), **options)
    assert "resumes at iteration 4, because 1 steps" in again[0].stdout
    assert samples_of(again) == PART[16:]
    reported = [event["progress"][0] for event in service.events("uploaded") if event["round"] > 0]
    assert reported == [2, 4, 6, 8, 10, 12]


def test_a_peer_of_asynchronous_rounds_resumes_in_mid_interval_where_nobody_else_had_its_place(
    make_service: MakeService, tmp_path: Path
):
    service = make_service(rounds="asynchronous")
    service.start()
    options: Options = {"train_iters": 12, "sync_service_interval": 2, "sync_service_index": 1}
    failing_job(service, "b", SINGLE, before=die_in_step(3), save=str(tmp_path), save_interval=3, **options)
    again = run_job(service, "b", SINGLE, before=remember_samples, load=str(tmp_path), **options)
    assert "part 1 of 2 of the samples, 1 steps after round 1" in again[0].stdout
    assert samples_of(again) == PART[12:]


@pytest.mark.parametrize(("batch", "iterations", "begins_at"), [(8, 6, 4), (2, 24, 16)])
def test_with_another_batch_it_resumes_at_the_same_samples(
    make_service: MakeService, batch: int, iterations: int, begins_at: int
):
    service = make_service(quorum=1, grace_seconds=0.5)
    service.start()
    options: Options = {"train_iters": 12, "sync_service_interval": 2, "sync_service_index": 1}
    failing_job(service, "b", SINGLE, before=die_in_step(9), **options)
    options = {**options, "global_batch_size": batch, "train_iters": iterations}
    again = run_job(service, "b", SINGLE, before=remember_samples, **options)
    assert f"resumes at iteration {begins_at}, because" in again[0].stdout
    assert samples_of(again) == PART[32:]
    assert again[0].record.steps[-1].iteration == iterations


def test_in_the_middle_of_a_batch_of_another_size_it_does_not_begin(make_service: MakeService):
    service = make_service(quorum=1, grace_seconds=0.5)
    service.start()
    options: Options = {"train_iters": 12, "sync_service_interval": 2, "sync_service_index": 1}
    failing_job(service, "b", SINGLE, before=die_in_step(9), **options)
    said = failing_job(service, "b", SINGLE, **{**options, "global_batch_size": 12, "train_iters": 4})
    assert "--global-batch-size 12: this peer's part of the samples is trained up to iteration 8 of 4" in said


def test_steps_smaller_than_asked_are_counted_as_they_are(make_service: MakeService, tmp_path: Path):
    service = make_service({"demo": {"peers": 1}, "again": {"peers": 1}})
    service.start()
    kind = ("dp2", "bf16-distopt", 2)
    options: Options = {"micro_batch_size": 2, "train_iters": 12}
    fours = model_of(run_job(service, "a", kind, **options))
    # Two replicas of two samples: steps have 4.
    smaller: Options = {"global_batch_size": 6, "eval_global_batch_size": 4, "decrease_batch_size_if_needed": True}
    options = {**options, **smaller, "sync_service_run": "again"}
    failing_job(service, "a", kind, before=die_in_step(7), save=str(tmp_path), save_interval=5, **options)
    resumed = run_job(service, "a", kind, load=str(tmp_path), **options)
    assert same_bits(fours, model_of(resumed))
    reported = [event["progress"][:2] for event in service.events("uploaded", run="again") if event["round"] > 0]
    assert reported == [[4, 16], [8, 32], [12, 48]]


@pytest.mark.parametrize("contributes", [True, False], ids=["after a contribution", "before any"])
def test_weights_alone_from_the_first_interval_leave_no_sample_out(
    make_service: MakeService, tmp_path: Path, contributes: bool
):
    service = make_service()
    service.start()
    options: Options = {"train_iters": 12, "sync_service_interval": 2}
    own: Options = {**options, "sync_service_index": 1, "save": str(tmp_path), "save_interval": 1}
    if contributes:
        # Saved after the first step, and gone while its round awaits the other peer.
        said = failing_job(service, "b", SINGLE, **{**own, "sync_service_round_seconds": 1})
        assert "round 1 has not come" in said
    else:
        failing_job(service, "b", SINGLE, before=die_in_step(1), **own)
    own = {**own, "load": str(tmp_path), "no_load_optim": True, "save_interval": 100}
    beginning = start_job(service, "b", SINGLE, before=remember_samples, **own)
    until(lambda: len(service.events("joined")) == 2, "the new process")
    other = start_job(service, "a", SINGLE, sync_service_index=0, **options)
    again = beginning.result()
    assert "resumes at iteration 0, because what this peer had made after it, up to iteration 1," in again[0].stdout
    assert samples_of(again) == PART
    assert same_bits(model_of(other.result()), model_of(again))
    counted = [event["contributors"] for event in service.events("committed")[1:]]
    assert counted == [["a", "b"]] * 6


@pytest.mark.parametrize(("batch", "iterations"), [(2, 24), (1, 48)])
def test_they_leave_none_out_with_another_batch_either(
    make_service: MakeService, tmp_path: Path, batch: int, iterations: int
):
    service = make_service(quorum=1, grace_seconds=0.2)
    service.start()
    options: Options = {"train_iters": 12, "sync_service_interval": 2, "sync_service_index": 1}
    failing_job(service, "b", SINGLE, before=die_in_step(1), save=str(tmp_path), save_interval=1, **options)
    options = {**options, "global_batch_size": batch, "train_iters": iterations}
    again = run_job(
        service, "b", SINGLE, before=remember_samples, load=str(tmp_path), no_load_optim=True, **options
    )
    assert samples_of(again) == PART


def test_a_contribution_with_another_batch_is_not_taken_for_the_one_that_is_made_again(make_service: MakeService):
    service = make_service()
    service.start()
    options: Options = {"train_iters": 12, "sync_service_interval": 2}
    own: Options = {**options, "sync_service_index": 1}
    assert "round 1 has not come" in failing_job(service, "b", SINGLE, **own, sync_service_round_seconds=1)
    options = {**options, "global_batch_size": 8, "train_iters": 6}
    own = {**options, "sync_service_index": 1}
    beginning = start_job(service, "b", SINGLE, before=remember_samples, **own, exit_interval=3)
    until(lambda: len(service.events("joined")) == 2, "the new process")
    # It has made one step of that size when this one has made two, and both end with the second round.
    run_job(service, "a", SINGLE, sync_service_index=0, **options, exit_interval=4)
    again = beginning.result()
    assert "resumes at iteration 1, because 1 steps" in again[0].stdout
    assert samples_of(again) == PART[8:24]


def test_weights_alone_of_another_peer_say_what_is_left_out(make_service: MakeService, tmp_path: Path):
    service = make_service(quorum=1, grace_seconds=0.2)
    service.start()
    options: Options = {"train_iters": 12, "sync_service_interval": 2}
    saving: Options = {**options, "sync_service_index": 0, "save": str(tmp_path), "save_interval": 5}
    failing_job(service, "a", SINGLE, before=die_in_step(5), **saving)
    own: Options = {**options, "sync_service_index": 1, "load": str(tmp_path), "no_load_optim": True}
    again = run_job(service, "b", SINGLE, before=remember_samples, **own)
    assert "the first 16 of part 1, of which no round has any, are left out" in again[0].stdout
    assert samples_of(again) == PART[16:]


def test_all_ranks_of_a_peer_ask_about_the_same_rounds(make_service: MakeService, tmp_path: Path):
    # Of two data parallel ranks one uploads, and only that one has residuals.
    service = make_service(quorum=1, grace_seconds=0.2)
    service.start()
    options: Options = {"train_iters": 12, "sync_service_interval": 2, "sync_service_codec": "int8"}
    own: Options = {**options, "sync_service_index": 1, "save": str(tmp_path)}
    kind = ("single", "fp32", 2)
    failing_job(service, "b", kind, before=die_in_step(5), save_interval=5, **own)
    run_job(service, "a", SINGLE, sync_service_index=0, **options)
    assert len(service.events("committed")) > 4
    again = run_job(service, "b", kind, load=str(tmp_path), save_interval=100, before=remember_samples, **own)
    assert samples_of(again) == PART[16:]


def test_schedules_resume_where_the_iteration_of_the_weights_is_that_of_the_last_round(
    make_service: MakeService, tmp_path: Path
):
    service = make_service(quorum=1, grace_seconds=0.2)
    service.start()
    options: Options = {"train_iters": 8, "sync_service_interval": 2, "sync_service_index": 1}
    options = {**options, "lr_decay_style": "linear", "min_lr": 0.0, "log_interval": 1}
    failing_job(service, "b", SINGLE, before=die_in_step(5), save=str(tmp_path), save_interval=4, **options)
    again = run_job(service, "b", SINGLE, load=str(tmp_path), no_load_optim=True, **options)
    assert "resumes at iteration 4, because this peer's last contribution ended there, with 16" in again[0].stdout
    rates = [float(rate) for rate in re.findall(r"learning rate: (\S+)", again[-1].stdout)]
    assert rates == pytest.approx([1e-2 * left / 8 for left in (3, 2, 1, 0)], abs=1e-9)


@pytest.mark.parametrize("alone", [True, False], ids=["weights alone", "all of it"])
def test_a_checkpoint_of_a_run_of_fewer_peers_begins_in_this_ones_part(
    make_service: MakeService, tmp_path: Path, alone: bool
):
    former = make_service(quorum=1, grace_seconds=0.2)
    former.start()
    options: Options = {"train_iters": 8, "sync_service_index": 1}
    failing_job(former, "b", SINGLE, before=die_in_step(2), save=str(tmp_path), save_interval=2, **options)
    assert former.server is not None
    former.server.kill()
    former.server.wait()
    shutil.rmtree(former.state)
    service = make_service(peers=4, quorum=1, grace_seconds=0.2)
    service.start()
    run_job(service, "a", SINGLE, sync_service_index=0, train_iters=8)
    again = run_job(
        service, "b", SINGLE, before=remember_samples, load=str(tmp_path), no_load_optim=alone or None, **options
    )
    # Of the 16 samples that the former run's peers have read together, four are of each of four parts.
    assert samples_of(again) == list(range(17, 113, 4))
