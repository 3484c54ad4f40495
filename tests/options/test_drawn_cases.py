# SPDX-License-Identifier: Apache-2.0
"""Command lines as the dice have them, with each feature: what is not refused by name trains, saves and resumes."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.local_sgd.runs import model_digests
from tests.options.drawn_cases import drawn_case
from tests.support.distributed import RankFailure
from tests.support.every_run import one_of_each
from tests.support.presets import Options, Value, toy_gpt
from tests.support.pretrain import RankOutcome, run_pretrain
from tests.sync_service.jobs import model_of, same_bits, values_held
from tests.sync_service.service import Service

MakeService = Callable[..., Service]

SEEDS = one_of_each(range(16), {3})
CUTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
PEER = {
    "train_iters": 6,
    "sync_service_run": "demo",
    "sync_service_interval": 2,
    "sync_service_round_seconds": 60,
    "sync_service_heartbeat_seconds": 0.3,
}
SPES = {"using_spes": True, "spes_num_train_experts_per_node": 2, "spes_expert_assignment": "interleaved"}
TIMEOUT = 240.0


def cuts_of(case: Options) -> tuple[int, int]:
    """Return the tensor-parallel ranks and the pipeline stages of a replica."""
    tensor, stages = (int(str(case.get(name) or 1)) for name in CUTS)
    return tensor, stages


def refused_in(failure: RankFailure) -> set[str]:
    """Return the options that a run has refused before it began, as they are called in `Options`."""
    said = re.search(r"UserError: arguments: (.*?)(?:\n--- |\Z)", str(failure), re.DOTALL)
    if said is None:
        return set()
    problems = said[1].split("\n")
    return {flag[2:].replace("-", "_") for line in problems for flag in re.findall(r"--[a-z0-9-]+", line)[:1]}


def as_far_as_it_is_not_refused(train: Callable[[dict[str, Value]], None], case: dict[str, Value]) -> None:
    """Train a case; where options of it are refused, train it without those.

    A run that ends in any other way fails the test, also one that still refuses something without them.
    """
    try:
        train(case)
    except RankFailure as failure:
        refused = refused_in(failure) & set(case)
        if not refused:
            raise
        train({name: value for name, value in case.items() if name not in refused})


def assert_resumes(command: Callable[..., list[str]], ranks: int, folder: Path) -> None:
    """Assert that a run that is resumed from its third iteration ends with the bits of the one that was not stopped."""
    through = run_pretrain(command(save=str(folder), save_interval=3), ranks, timeout=TIMEOUT)
    resumed = run_pretrain(command(load=str(folder), ckpt_step=3), ranks, timeout=TIMEOUT)
    assert resumed[0].record.steps[0].iteration == 4
    assert model_digests(through) == model_digests(resumed)


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_of_local_sgd_train_and_resume(seed: int, tmp_path: Path):
    def train(case: dict[str, Value]) -> None:
        tensor, stages = cuts_of(case)
        ours = {"use_local_sgd": True, "local_sgd_workers": 2, "local_sgd_sync_interval": 2, "train_iters": 5}
        assert_resumes(lambda **more: toy_gpt(case, ours, **more), 2 * tensor * stages, tmp_path)

    as_far_as_it_is_not_refused(train, drawn_case(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_strategies_train_and_resume(seed: int, tmp_path: Path):
    def train(case: dict[str, Value]) -> None:
        tensor, stages = cuts_of(case)
        home, guest = f"{2 // (tensor * stages)},{tensor},{stages}", "2,1,1" if tensor * stages > 1 else "1,2,1"
        ours = {
            "micro_batch_size": 1,
            "calculate_per_token_loss": True,
            "vocab_size": 127,
            "make_vocab_size_divisible_by": 8,
            "train_iters": 5,
            "hot_switch_strategies": [home, guest],
            "hot_switch_bucket_sizes": [32, 16, 0],
            **dict.fromkeys(CUTS),
        }
        assert_resumes(lambda **more: toy_gpt(case, ours, **more), 2, tmp_path)

    as_far_as_it_is_not_refused(train, drawn_case(seed))


def peers_of(service: Service, case: Options, folder: Path, **more: Value) -> list[list[RankOutcome]]:
    """Run all peers of a service's run, and return what each has computed."""
    tensor, stages = cuts_of(case)
    count = service.runs["demo"]["peers"]

    def train(number: int) -> list[RankOutcome]:
        name = f"p{number}"
        own = {"sync_service": service.address, "sync_service_peer": name, "sync_service_index": number}
        files = {option: str(folder / name) for option, wanted in more.items() if wanted is True}
        command = toy_gpt(case, PEER, own, sync_service_peers=count, **{**more, **files})
        return run_pretrain(command, tensor * stages, probe=values_held, timeout=TIMEOUT)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(train, range(count)))


def assert_peers_resume(make_service: MakeService, run: dict[str, Value], case: Options, folder: Path) -> None:
    """Assert that peers that resume in the middle of an interval end with the bits of ones that were not stopped."""
    found = []
    for legs in ([{}], [{"exit_interval": 3, "save": True, "save_interval": 100}, {"load": True}]):
        service = make_service(outer_optimizer="sgd", outer_optimizer_lr=0.7, **run)
        service.start()
        for leg in legs:
            peers = peers_of(service, case, folder, **leg)
        found.append([model_of(peer) for peer in peers])
        service.stop()
    assert all(same_bits(*pair) for pair in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_peer_trains_and_resumes(make_service: MakeService, seed: int, tmp_path: Path):
    def train(case: dict[str, Value]) -> None:
        assert_peers_resume(make_service, {"peers": 1}, case, tmp_path)

    as_far_as_it_is_not_refused(train, drawn_case(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_peers_that_own_half_of_the_experts_each_train_and_resume(make_service: MakeService, seed: int, tmp_path: Path):
    def train(case: dict[str, Value]) -> None:
        assert_peers_resume(make_service, {"peers": 2, "sync_steps": 2}, {**case, **SPES}, tmp_path)

    as_far_as_it_is_not_refused(train, drawn_case(seed, experts=True))
