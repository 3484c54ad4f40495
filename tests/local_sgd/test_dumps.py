# SPDX-License-Identifier: Apache-2.0
"""Megatron's dumps (--save-params-interval and its like) have a folder for each worker: SAVE/worker_0/wgrads/..."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.local_sgd.meetings.test_meeting_runs import by_time
from tests.local_sgd.runs import arguments, local_run
from tests.support.dumps import assert_same, dumps, iterations
from tests.support.every_run import one_of_each
from tests.support.presets import GROUPED, LAYOUTS
from tests.support.pretrain import as_worker, run_pretrain
from tests.support.transformer_engine import accept_transformer_engine

DUMPS = {"save_params_interval": 1, "save_wgrads_interval": 1, "save_interval": 100}


def assert_every_dump_is_a_workers(saved: Path) -> None:
    assert {path.relative_to(saved).parts[0] for path in saved.rglob("*.pth")} == {"worker_0", "worker_1"}


@pytest.mark.parametrize(("layout", "precision"), one_of_each([("dp2", "bf16-distopt"), ("tp2", "fp32")], {0}))
def test_a_worker_dumps_what_a_job_of_its_own_would(tmp_path: Path, layout: str, precision: str):
    # The round comes after the second iteration, and so after its dumps.
    options = {**DUMPS, "train_iters": 3, "local_sgd_sync_interval": 2}
    local_run(layout, precision, workers=2, **options, save=str(tmp_path / "together"))
    assert_every_dump_is_a_workers(tmp_path / "together")
    found = []
    for worker in range(2):
        own, alone = tmp_path / "together" / f"worker_{worker}", tmp_path / f"alone_{worker}"
        run_pretrain(
            arguments(layout, precision, workers=None, **DUMPS, train_iters=2, save=str(alone)),
            LAYOUTS[layout].world_size(1),
            patch="backend-only",
            before=as_worker(worker, 2),
        )
        found.append(dumps(own))
        assert len({name.split("/")[2] for name in found[-1]}) == LAYOUTS[layout].model_parallel_size
        before_the_round = {name: value for name, value in found[-1].items() if "iter_0000003" not in name}
        assert len(before_the_round) > 80 and len(before_the_round) < len(found[-1])
        assert_same(before_the_round, dumps(alone))
    assert any(not torch.equal(value, found[1][name]) for name, value in found[0].items() if "wgrads" in name)


def test_in_warm_up_every_worker_dumps_the_gradients_of_the_whole_batch(tmp_path: Path):
    options = {"save_wgrads_interval": 1, "save_interval": 100}
    warm_up = {**options, "train_iters": 2, "local_sgd_warmup_steps": 1}
    local_run("dp2", "fp32-distopt", workers=2, **warm_up, save=str(tmp_path / "workers"))
    stock = {**options, "train_iters": 1, "save": str(tmp_path / "all")}
    run_pretrain(arguments("dp2", "fp32-distopt", workers=None, batch=8, **stock), 4, patch="backend-only")
    whole = dumps(tmp_path / "all")
    for worker in range(2):
        own = dumps(tmp_path / "workers" / f"worker_{worker}")
        assert whole.keys() == {name for name in own if "iter_0000001" in name}
        for name, value in whole.items():
            assert torch.allclose(own[name], value, rtol=1e-4, atol=1e-6), name


def test_workers_that_meet_by_time_dump_the_first_step_after_each_meeting(tmp_path: Path):
    options = {**DUMPS, "save_params_interval": 2, "train_iters": 5, "save": str(tmp_path / "saved")}
    local_run("single", "fp32", workers=2, **by_time(tmp_path, [[1, 2], [3, 1], [2, 1]], **options))
    assert_every_dump_is_a_workers(tmp_path / "saved")
    alone = arguments("single", "fp32", workers=None, **DUMPS, train_iters=1, save=str(tmp_path / "alone"))
    run_pretrain(alone, 1, patch="backend-only", before=as_worker(1, 2))
    for worker in range(2):
        own = tmp_path / "saved" / f"worker_{worker}"
        assert iterations(own) == {
            *(("wgrads", f"iter_{number:07d}") for number in (1, 2, 3)),
            ("params", "iter_0000002"),
        }
    first = dumps(tmp_path / "saved" / "worker_1")
    of_the_first_step = {name: value for name, value in dumps(tmp_path / "alone").items() if "wgrads" in name}
    assert_same({name: first[name] for name in of_the_first_step}, of_the_first_step)


@pytest.mark.slow
@pytest.mark.usefixtures("double_of_transformer_engine")
def test_what_goes_through_layers_is_dumped_by_worker(tmp_path: Path):
    every = {f"save_{what}_interval": 1 for what in ("activations", "dgrads", "tokens_per_expert")}
    options = {**GROUPED, **every, "transformer_impl": "transformer_engine", "train_iters": 2, "save_interval": 100}
    ours = {**options, "local_sgd_sync_interval": 2, "save": str(tmp_path / "ours")}
    run_pretrain(arguments("moe-ep2", "bf16", workers=2, **ours), 4, before=accept_transformer_engine)
    for worker in range(2):
        alone = tmp_path / f"alone_{worker}"
        command = arguments("moe-ep2", "bf16", workers=None, **options, save=str(alone))
        run_pretrain(command, 2, patch="backend-only", before=(accept_transformer_engine, as_worker(worker, 2)))
        own = tmp_path / "ours" / f"worker_{worker}"
        assert iterations(own) == {(what, f"iter_000000{n}") for what in ("activations", "dgrads") for n in (1, 2)}
        assert_same(dumps(own), dumps(alone))
        counts, expected = (sorted(folder.rglob("rank*.jsonl")) for folder in (own, alone))
        assert len(counts) == len(expected) == 2
        assert [path.read_text() for path in counts] == [path.read_text() for path in expected]
        assert {json.loads(line)["iter"] for line in counts[0].read_text().splitlines()} == {1, 2}
