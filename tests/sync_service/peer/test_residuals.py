# SPDX-License-Identifier: Apache-2.0
"""A lossy codec's residuals are sent once, wherever a peer is killed that resumes from the checkpoint before."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megatron_ext.sync_service.peer.client import SyncClient
from megatron_ext.sync_service.protocol.resuming import KEPT_RESULTS
from tests.support.waiting import until
from tests.sync_service.service import Service

MakeService = Callable[..., Service]
PROGRESS = torch.tensor([1.0, 0.13, 0.27, 0.31, -0.44, 0.55, -0.66, 0.07]).repeat(1 << 13)
START = {"w": torch.zeros_like(PROGRESS)}
ROUNDS = 3


class Job:
    """A peer that makes the same progress in every interval, and may be started again."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.open: Callable[[], SyncClient] = lambda: service.client("p0", START, codec="int4")
        self.client = self.open()
        self.values = self.client.start(START)["w"]

    def interval(self) -> dict[str, torch.Tensor]:
        return {"w": self.values + PROGRESS}

    def train(self) -> None:
        self.values = self.client.sync(self.interval()).values["w"]

    def checkpoint(self) -> tuple[int, torch.Tensor, dict[str, torch.Tensor]]:
        return self.client.round, self.values.clone(), {key: value.clone() for key, value in self.residuals.items()}

    def restart(self, saved: tuple[int, torch.Tensor, dict[str, torch.Tensor]], *, repeats: bool = True) -> bool:
        """Resume from a checkpoint; return whether in the middle of its interval."""
        self.client.close()
        self.client = self.open()
        number, self.values, self.client.residuals = saved
        newest = self.client.resume(number, repeats=repeats)
        self.values = self.values if newest is None else newest["w"]
        return newest is None

    @property
    def residuals(self) -> dict[str, torch.Tensor]:
        return self.client.residuals

    def has_come(self) -> torch.Tensor:
        """Return what others have of the progress, and will get with the next contribution."""
        return self.values - self.residuals["w"] if self.residuals else self.values


def started(make_service: MakeService, **run: Any) -> Job:
    """Return a job that has made some rounds, and has residuals."""
    service = make_service(peers=1, **run)
    service.start()
    job = Job(service)
    for _ in range(ROUNDS):
        job.train()
    assert job.residuals["w"].abs().max() > 0.02
    torch.testing.assert_close(job.has_come(), ROUNDS * PROGRESS)
    return job


def trained_once(make_service: MakeService, **run: Any) -> tuple[Job, torch.Tensor]:
    """Return a job that has made a round, and its residual."""
    service = make_service(**run)
    service.start()
    job = Job(service)
    job.train()
    residual = job.residuals["w"].clone()
    assert residual.abs().max() > 0.02
    return job, residual


def train_in_vain(job: Job) -> None:
    """Let another peer make rounds until what the job makes of its values is too old to count."""
    with job.service.client("p1", START, codec="int4") as other:
        held = other.start(START)
        for _ in range(4):
            held = other.sync(held).values
    job.train()
    assert len(job.service.events("stale")) == 1


@pytest.mark.parametrize("place", ["before the upload", "after the upload"])
def test_a_peer_that_makes_its_interval_again_loses_nothing(make_service: MakeService, place: str):
    job = started(make_service)
    saved = job.checkpoint()
    assert job.service.server is not None
    # There is room for the upload, and not for the values of a round.
    job.service.server.limit_files(200_000)
    if place == "after the upload":
        job.client.upload(ROUNDS + 1, job.interval())
    assert job.restart(saved)
    job.service.server.limit_files(-1)
    job.train()
    torch.testing.assert_close(job.has_come(), (ROUNDS + 1) * PROGRESS)


@pytest.mark.parametrize("rounds", ["synchronous", "asynchronous"])
def test_a_peer_whose_contribution_counts_already_does_not_send_its_residuals_again(
    make_service: MakeService, rounds: str
):
    job = started(make_service, rounds=rounds)
    saved = job.checkpoint()
    job.train()
    lost = job.residuals["w"].clone()
    assert not job.restart(saved)
    assert not job.residuals
    # Only what the contribution that counted has lost itself.
    torch.testing.assert_close(job.has_come(), (ROUNDS + 1) * PROGRESS + lost)


def test_a_peer_without_which_the_others_continued_still_sends_its_residuals(make_service: MakeService):
    service = make_service(quorum=1, grace_seconds=0.0)
    service.start()
    job = Job(service)
    with service.client("p1", START, codec="int4") as other:
        held = other.start(START)["w"]
        job.client.upload(1, job.interval())
        other.upload(1, {"w": held})
        job.values = job.client.fetch(1, job.interval()).values["w"]
        held = other.fetch(1, {"w": held}).values["w"]
        saved, residual = job.checkpoint(), job.residuals["w"].clone()
        assert residual.abs().max() > 0.02
        for _ in range(2):
            held = other.sync({"w": held}).values["w"]
        assert not job.restart(saved)
        torch.testing.assert_close(job.residuals["w"], residual, rtol=0, atol=0)


def test_a_peer_that_slept_until_nobody_knows_what_counted_does_not_send_its_residuals_again(
    make_service: MakeService, caplog: pytest.LogCaptureFixture
):
    job, _ = trained_once(make_service, quorum=1, grace_seconds=0.0)
    with job.service.client("p1", START, codec="int4") as other:
        held = other.start(START)
        job.client.upload(2, job.interval())
        until(lambda: len(job.service.events("committed")) == 3, "the round that counts it")
        for _ in range(KEPT_RESULTS + 1):  # the first one comes too late
            held = other.sync(held).values
        found = job.client.fetch(2, job.interval())
    assert "too long ago to know" in caplog.text and "too long ago to know" in found.message
    assert not job.residuals


def test_a_peer_that_slept_before_it_contributed_keeps_its_residuals(make_service: MakeService):
    job, residual = trained_once(make_service, quorum=1, grace_seconds=0.0)
    with job.service.client("p1", START, codec="int4") as other:
        held = other.start(START)
        for _ in range(KEPT_RESULTS + 2):
            held = other.sync(held).values
    assert not job.client.upload(2, job.interval())
    assert not job.client.fetch(2, job.interval()).contributed
    torch.testing.assert_close(job.residuals["w"], residual, rtol=0, atol=0)


def test_residuals_that_have_come_in_a_later_round_are_not_sent_again(make_service: MakeService):
    service = make_service(peers=2, quorum=1, grace_seconds=30.0, max_norm=1e4)
    service.start()
    with ThreadPoolExecutor(1) as pool, service.client("p1", START, codec="int4") as other:
        beginning = pool.submit(other.start, START)
        job = Job(service)
        held = beginning.result()["w"]

        def together(values: dict[str, torch.Tensor]) -> bool:
            nonlocal held
            theirs = pool.submit(other.sync, {"w": held})
            ours = job.client.sync(values)
            held, job.values = theirs.result().values["w"], ours.values["w"]
            return bool(ours.contributed)

        assert together(job.interval())
        saved = job.checkpoint()
        assert job.residuals["w"].abs().max() > 0.02
        # The first one does not count, and the second one brings the residuals.
        assert not together({"w": job.values + 1e6})
        assert together(job.interval())
        assert not job.restart(saved)
        assert not job.residuals


def test_residuals_stay_when_the_round_that_was_awaited_refuses_what_was_sent(make_service: MakeService):
    service = make_service(peers=2, max_norm=1e4)
    service.start()
    with ThreadPoolExecutor(1) as pool, service.client("p1", START, codec="int4") as other:
        beginning = pool.submit(other.start, START)
        job = Job(service)
        held = beginning.result()["w"]
        theirs = pool.submit(other.sync, {"w": held})
        job.train()
        held, saved, residual = theirs.result().values["w"], job.checkpoint(), job.residuals["w"].clone()
        assert residual.abs().max() > 0.02
        job.client.upload(2, {"w": job.values + 1e6})
        restarted = pool.submit(job.restart, saved, repeats=False)
        until(lambda: len(service.events("joined")) == 3, "the new process")
        other.sync({"w": held})
        assert not restarted.result()
        torch.testing.assert_close(job.residuals["w"], residual, rtol=0, atol=0)


def test_residuals_stay_when_what_was_sent_with_it_was_too_old(make_service: MakeService):
    job, residual = trained_once(make_service, peers=2, rounds="asynchronous", max_staleness=1)
    saved = job.checkpoint()
    train_in_vain(job)
    assert not job.restart(saved)
    torch.testing.assert_close(job.residuals["w"], residual, rtol=0, atol=0)


def test_a_round_in_which_nobody_counted_leaves_the_residuals(make_service: MakeService):
    job, residual = trained_once(make_service, quorum=1, grace_seconds=0.0, max_norm=1e4)
    saved = job.checkpoint()
    with job.service.client("p1", START, codec="int4") as other:
        held = other.start(START)
        assert not other.sync({"w": held["w"] + 1e6}).contributed
    assert job.service.events("committed")[-1]["contributors"] == []
    assert not job.restart(saved)
    torch.testing.assert_close(job.residuals["w"], residual, rtol=0, atol=0)


def test_residuals_are_not_sent_again_when_the_one_before_the_last_brought_it(make_service: MakeService):
    service = make_service(peers=2, rounds="asynchronous", max_staleness=1)
    service.start()
    job = Job(service)
    job.train()
    saved = job.checkpoint()
    job.train()
    train_in_vain(job)
    assert not job.restart(saved)
    assert not job.residuals
