# SPDX-License-Identifier: Apache-2.0
"""Peers that train on conversations (`--sft`, with hot switching): each on its part of them."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.hot_switch.data.test_conversations import (  # noqa: F401  # fixtures
    folder,
    of_conversations,
    the_data,
    with_datasets,
)
from tests.support.presets import Value
from tests.support.pretrain import Before, RankOutcome, run_failing_pretrain, run_pretrain
from tests.sync_service.jobs import (
    ALONE,
    Kind,
    die_in_step,
    job_arguments,
    model_of,
    same_bits,
    samples_of,
    values_held,
)
from tests.sync_service.megatron.test_switching_peers import remember_sequences
from tests.sync_service.service import Service

KIND: Kind = ("single", "bf16-distopt", 2)
RUNS = {
    "demo": {"peers": 2, "outer_optimizer": "sgd", "outer_optimizer_lr": 0.7, "outer_optimizer_momentum": 0.9},
    "whole": {"peers": 1, "outer_optimizer": "none"},
    "again": {"peers": 1, "outer_optimizer": "none"},
}


@pytest.mark.slow
def test_peers_on_conversations_end_equal_and_one_that_is_killed_resumes_with_the_same_bits(
    make_service: Callable[..., Service],
    tmp_path: Path,
    folder: Path,  # noqa: F811  # fixtures that are imported have the arguments' names
    with_datasets: Before,  # noqa: F811  # likewise
):
    service = make_service(RUNS)
    service.start()
    saved = os.fspath(tmp_path / "saved")
    # Of 54 conversations, two peers read 48.
    shared: dict[str, Value] = {
        **of_conversations(folder, **the_data(folder), train_iters=6),
        "sync_service_interval": 3,
        "calculate_per_token_loss": True,
        "hot_switch_strategies": ["2,1,1", "1,2,1"],
        "hot_switch_bucket_sizes": [64, 52, 0],
        "eval_iters": 1,
        "eval_interval": 3,
    }
    alone: dict[str, Value] = {**shared, "sync_service_peers": 1}

    def train(name: str, **more: Value) -> list[RankOutcome]:
        command = job_arguments(service, name, KIND, **more)
        before = (with_datasets, remember_sequences)
        return run_pretrain(command, 2, before=before, probe=values_held, timeout=120)

    def of_two(index: int) -> list[RankOutcome]:
        return train("ab"[index], **shared, sync_service_index=index)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(of_two, range(2))
    assert same_bits(model_of(first), model_of(second))
    assert len(samples_of(first)) == len(samples_of(second)) == 24
    assert set(samples_of(first)).isdisjoint(samples_of(second))
    whole = train("a", **alone, sync_service_run="whole")
    stock = train("none", **{**shared, **ALONE, "sync_service_interval": None})
    assert [rank.losses for rank in whole] == [rank.losses for rank in stock]
    assert [rank.optimizer for rank in whole] == [rank.optimizer for rank in stock]
    again: dict[str, Any] = {**alone, "sync_service_run": "again"}
    killed = job_arguments(service, "a", KIND, **again, save=saved, save_interval=4)
    run_failing_pretrain(killed, 2, before=(with_datasets, die_in_step(5)), timeout=120)
    resumed = train("a", **again, load=saved)
    assert len(resumed[0].record.steps) == 2
    assert same_bits(model_of(whole), model_of(resumed))
