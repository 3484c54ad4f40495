# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of weights without optimizers' states: those that all workers had last, for any job, and no more."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.local_sgd.runs import arguments, local_run, same_state, worker_slices
from tests.local_sgd.test_router_biases import BIASED, biases
from tests.support.every_run import one_of_each
from tests.support.presets import LAYOUTS, Options
from tests.support.pretrain import RankOutcome, run_pretrain
from tests.support.slow_writer import ASYNC

# Rounds follow iterations 5 and 8; 1 lies in warm-up, 3, 4 and 7 in mid-interval.
SCHEDULE: Options = {"train_iters": 8, "local_sgd_warmup_steps": 2, "local_sgd_sync_interval": 3}
STREAMING: Options = {"local_sgd_fragments": 2, "local_sgd_fragment_sync_delay": 1}
WRITING: dict[str, tuple[str, str, Options]] = {
    "sharded": ("dp2", "bf16-distopt-overlap", {}),
    "files": ("tp2", "bf16", {"ckpt_format": "torch"}),
    "asynchronous": ("single", "fp32", ASYNC),
}


def loaded(layout: str, precision: str, folder: Path, iteration: int, **more: Any) -> list[object]:
    """Return the weights that a stock job has, after a step that changes none."""
    options = {
        "load": str(folder),
        "ckpt_step": iteration,
        "no_load_optim": True,
        "train_iters": iteration + 1,
        "lr": 1e-30,
        "weight_decay": 0.0,
        **more,
    }
    command = arguments(layout, precision, workers=None, **options)
    ranks = run_pretrain(command, LAYOUTS[layout].world_size(1), patch="backend-only")
    return [rank.parameters for rank in ranks]


@pytest.mark.parametrize("way", one_of_each(list(WRITING), {0, 1}))
def test_weights_alone_are_those_of_the_last_round(tmp_path: Path, way: str):
    layout, precision, writing = WRITING[way]
    saving: Options = {"save": str(tmp_path), "save_interval": 1, "no_save_optim": True, **writing}
    through = local_run(layout, precision, workers=2, **SCHEDULE, **saving)
    assert "--no-save-optim: checkpoints have the weights of the last round" in "".join(rank.stdout for rank in through)
    assert same_state(through, local_run(layout, precision, workers=2, **SCHEDULE))  # saves change nothing
    form = {"ckpt_format": writing["ckpt_format"]} if "ckpt_format" in writing else {}
    found = {iteration: loaded(layout, precision, tmp_path, iteration, **form) for iteration in (2, 4, 5, 7, 8)}
    assert found[2] == found[4] != found[5] == found[7] != found[8]
    assert found[8] == [rank.parameters for rank in through[: len(found[8])]]


def test_between_rounds_of_fragments_they_are_the_synced_ones(tmp_path: Path):
    saving: Options = {"save": str(tmp_path), "save_interval": 1, "no_save_optim": True, **STREAMING}
    through = local_run("single", "fp32", workers=2, **SCHEDULE, **saving)
    assert same_state(through, local_run("single", "fp32", workers=2, **SCHEDULE, **STREAMING))
    found = [loaded("single", "fp32", tmp_path, iteration) for iteration in (6, 7, 8)]
    assert found[0] != found[2] == [through[0].parameters]
    apart = local_run("single", "fp32", workers=2, **SCHEDULE, **STREAMING, exit_interval=7)
    assert apart[0].parameters != apart[1].parameters
    assert found[1] not in ([rank.parameters] for rank in apart)


def test_any_number_of_workers_begins_with_them(tmp_path: Path):
    saving: Options = {"save": str(tmp_path), "save_interval": 4, "no_save_optim": True, "exit_interval": 4}
    local_run("single", "bf16", workers=2, **SCHEDULE, **saving)
    start: Options = {"load": str(tmp_path), "finetune": True, "lr": 1e-30, "weight_decay": 0.0}
    ranks = local_run("single", "bf16", workers=3, **{**SCHEDULE, **start})
    assert "a checkpoint without local-SGD state" in "".join(rank.stdout for rank in ranks)
    synced = loaded("single", "bf16", tmp_path, 4)
    assert all([rank.parameters] == synced for rank in ranks)


def test_biases_of_routers_are_the_mean_of_the_workers(tmp_path: Path):
    def run(workers: int | None, **options: Any) -> list[RankOutcome]:
        command = arguments("moe-ep2", "bf16", workers=workers, **{**SCHEDULE, **BIASED, **options})
        return run_pretrain(command, LAYOUTS["moe-ep2"].world_size(workers or 1), probe=biases)

    apart = run(2, save=str(tmp_path), save_interval=4, no_save_optim=True, exit_interval=4)
    of_workers = [np.float32(ranks[0].probe) for ranks in worker_slices(apart, "moe-ep2", 2)]
    assert not np.array_equal(*of_workers)
    nothing_moves = {"lr": 1e-30, "weight_decay": 0.0, "moe_router_bias_update_rate": 0.0}
    warmup = dict.fromkeys(("local_sgd_warmup_steps", "local_sgd_sync_interval"))
    stock = run(None, **warmup, load=str(tmp_path), no_load_optim=True, train_iters=5, **nothing_moves)
    assert np.array_equal(np.float32(stock[0].probe), (of_workers[0] + of_workers[1]) / 2)
