# SPDX-License-Identifier: Apache-2.0
"""Jobs resume as peers from the checkpoint of a job that had all samples to itself."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.errors import UserError
from megatron_ext.hooks import LoadContext
from megatron_ext.sync_service.megatron.whole_run import count_schedule_in_own_samples, resume_in_part
from tests.support.every_run import one_of_each
from tests.support.pretrain import RankOutcome, run_pretrain
from tests.sync_service.jobs import ALONE, SINGLE, job_arguments, remember_samples, samples_of, start_job
from tests.sync_service.service import Service

MakeService = Callable[..., Service]
SCHEDULE = {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "min_lr": 1e-3}
STOCK = {**ALONE, "global_batch_size": 8}


def learning_rates(rank: RankOutcome) -> list[str]:
    return re.findall(r"learning rate: (\S+)", rank.stdout)


def test_peers_resume_with_the_samples_the_schedule_and_the_moments_of_a_stock_job(
    make_service: MakeService, tmp_path: Path
):
    service = make_service(peers=2)
    service.start()

    def alone(**options: object) -> RankOutcome:
        arguments = job_arguments(service, "none", SINGLE, **SCHEDULE, **STOCK, **options)
        return run_pretrain(arguments, 1, patch="backend-only")[0]

    saved = str(tmp_path / "stock")
    alone(save=saved, save_interval=4, exit_interval=4)
    on = alone(load=saved)
    jobs = [
        start_job(service, name, SINGLE, before=remember_samples, load=saved, sync_service_index=index, **SCHEDULE)
        for index, name in enumerate("ab")
    ]
    ends = [job.result() for job in jobs]
    assert [samples_of(job) for job in ends] == [list(range(32, 64, 2)), list(range(33, 64, 2))]
    first, other = (job[0] for job in ends)
    # They begin with its weights, and the samples of its next step.
    assert (first.losses[0] + other.losses[0]) / 2 == pytest.approx(on.losses[0], rel=1e-6)
    assert len(first.losses) == len(on.losses) == 4
    # Adam makes steps of another size while its moments are young.
    assert (first.losses[1] + other.losses[1]) / 2 == pytest.approx(on.losses[1], rel=1e-2)
    assert learning_rates(first) == learning_rates(other) == learning_rates(on)
    assert "resumes at iteration 4 of a job that was not a peer" in first.stdout


def loaded(then: int, now: int, **schedule: float) -> dict[str, float]:
    state = {
        "args": SimpleNamespace(global_batch_size=then),
        "opt_param_scheduler": {
            "num_steps": 64,
            "lr_warmup_steps": 16,
            "lr_decay_steps": 256,
            "wd_incr_steps": 256,
            "max_lr": 0.5,
            **schedule,
        },
    }
    args = SimpleNamespace(global_batch_size=now)
    count_schedule_in_own_samples(LoadContext(args=args, directory="there", state=state, common_only=False))
    return state["opt_param_scheduler"]


def test_the_schedule_stays_at_its_iteration_whatever_the_batch():
    halved = {"num_steps": 32, "lr_warmup_steps": 8, "lr_decay_steps": 128, "wd_incr_steps": 128, "max_lr": 0.5}
    assert loaded(16, 8) == halved
    # Megatron compares them with its own, which are whole.
    assert all(isinstance(value, int) for name, value in loaded(16, 8).items() if name.endswith("steps"))
    assert loaded(8, 8)["num_steps"] == 64
    # A warm-up that is a fraction of the whole need not be whole.
    assert loaded(16, 8, lr_warmup_steps=2.5)["lr_warmup_steps"] == 1.25


def test_weights_alone_have_no_schedule():
    context = LoadContext(
        args=SimpleNamespace(global_batch_size=4),
        directory="there",
        state={"args": SimpleNamespace(global_batch_size=8)},
        common_only=False,
    )
    count_schedule_in_own_samples(context)
    assert list(context.state) == ["args"]


@pytest.mark.parametrize(
    ("consumed", "before", "peers", "part"),
    [(0, 1, 3, 0), (12, 1, 3, 4), (13, 1, 3, 5), (12, 3, 3, 12), (12, 3, 2, 18), (7, 3, 2, 11), (7, 2, 1, 14)],
)
def test_no_sample_comes_twice(consumed: int, before: int, peers: int, part: int):
    args = SimpleNamespace(consumed_train_samples=consumed, iteration=4, dataloader_type="single")
    resume_in_part(args, peers, before)
    assert args.consumed_train_samples == part
    args.dataloader_type = "cyclic"
    args.consumed_train_samples = consumed
    if consumed and before != peers:
        with pytest.raises(UserError, match="--dataloader-type cyclic draws its samples in another order"):
            resume_in_part(args, peers, before)
    else:
        resume_in_part(args, peers, before)
        assert args.consumed_train_samples == consumed


@pytest.mark.parametrize(("name", "weights_alone"), one_of_each([("two", False), ("one", True)], {1}))
def test_a_run_with_fewer_peers_resumes_after_the_samples_of_all_earlier_ones(
    make_service: MakeService, tmp_path: Path, name: str, weights_alone: bool
):
    services = [make_service({"one": {"peers": 2}}), make_service({name: {"peers": 1}})]
    for service in services:
        service.start()
    common = {"before": remember_samples, "save_interval": 8}
    first = [
        start_job(services[0], peer, SINGLE, save=str(tmp_path / peer), sync_service_index=index, **common)
        for index, peer in enumerate("ab")
    ]
    seen = {sample for job in first for sample in samples_of(job.result())}
    options = {"sync_service_run": name, "sync_service_peers": 1, "override_opt_param_scheduler": True}
    if weights_alone:
        options["no_load_optim"] = True  # the server would not know the place of a run of this name
    on = start_job(services[1], "a", SINGLE, load=str(tmp_path / "a"), train_iters=16, **common, **options)
    ranks = on.result()
    assert len(seen) == 64 and samples_of(ranks) == list(range(64, 96))
    assert "resumes at iteration 8 of a run of 2 peers that consumed 64 samples" in ranks[0].stdout
