# SPDX-License-Identifier: Apache-2.0
"""Options of Megatron in bundles: peers that meet, one that meets nobody, and one that is killed and resumes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.every_run import one_of_each
from tests.support.option_bundles import LAID_OUT, MODELS, SAVED, SPREAD, WITH_FILES, changed_values, options_with_files
from tests.support.presets import LAYOUTS, Options
from tests.support.pretrain import run_pretrain
from tests.sync_service.jobs import (
    ALONE,
    Kind,
    die_in_step,
    failing_job,
    job_arguments,
    model_of,
    run_job,
    same_bits,
    start_job,
    values_held,
)
from tests.sync_service.service import Service

MakeService = Callable[..., Service]
SGD = {"outer_optimizer": "sgd", "outer_optimizer_lr": 0.7, "outer_optimizer_momentum": 0.9}
SINGLE_PEER = {"peers": 1, "outer_optimizer": "none"}
BUNDLES = [*MODELS, *LAID_OUT, *WITH_FILES, *SPREAD, *SAVED]


def kind_and_options(bundle: str, folder: Path) -> tuple[Kind, Options]:
    """Return how a bundle's job is cut, and what it asks for."""
    if bundle in LAID_OUT:
        layout, options = LAID_OUT[bundle]
        return (layout, "bf16-distopt", LAYOUTS[layout].world_size()), options
    if bundle in SPREAD:
        layout, ranks, options = SPREAD[bundle]
        return (layout, "bf16-distopt", ranks), options
    if bundle in SAVED:
        return ("moe-ep2", "bf16-distopt", 2), {}
    options = options_with_files(bundle, folder) if bundle in WITH_FILES else MODELS[bundle]
    return ("single", "bf16-distopt", 1), options


@pytest.mark.parametrize("bundle", one_of_each(BUNDLES, {17}))
def test_peers_end_equal_and_one_alone_is_a_stock_job_also_when_it_is_killed_and_resumes(
    make_service: MakeService, tmp_path: Path, bundle: str
):
    kind, options = kind_and_options(bundle, tmp_path)
    service = make_service({"demo": {"peers": 2, **SGD}, "whole": SINGLE_PEER, "again": SINGLE_PEER})
    service.start()
    jobs = [start_job(service, name, kind, sync_service_index=index, **options) for index, name in enumerate("ab")]
    first, second = [job.result() for job in jobs]
    assert first[-1].losses != second[-1].losses
    assert same_bits(model_of(first), model_of(second))
    whole = run_job(service, "a", kind, **{**options, "sync_service_run": "whole", "sync_service_peers": 1})
    stock = run_pretrain(job_arguments(service, "none", kind, **{**options, **ALONE}), kind[2], probe=values_held)
    assert [rank.losses for rank in whole] == [rank.losses for rank in stock]
    assert [rank.parameters for rank in whole] == [rank.parameters for rank in stock]
    assert [rank.optimizer for rank in whole] == [rank.optimizer for rank in stock]
    changed = changed_values(whole[0].stdout, stock[0].stdout)
    assert [name for name in changed if not name.startswith("sync_service")] == []
    saving, reading = SAVED.get(bundle, ({"save_interval": 5}, {}))
    folder = os.fspath(tmp_path / "saved")
    again: Options = {**options, "sync_service_run": "again", "sync_service_peers": 1}
    failing_job(service, "a", kind, before=die_in_step(7), save=folder, **{**again, **saving})
    assert [path.name for path in (tmp_path / "saved").glob("**/iter_*")] != []
    assert ("log_progress" in saving) == (tmp_path / "saved/progress.txt").exists()
    resumed = run_job(service, "a", kind, load=folder, **{**again, **reading})
    assert same_bits(model_of(whole), model_of(resumed))
    assert len(resumed[-1].losses) < len(whole[-1].losses)


# What a job says that begins with the checkpoint of another; the first of two is said by that one.
BEGINNINGS: dict[str, tuple[Options, Options]] = {
    "first sample": ({"no_save_optim": True}, {"finetune": True}),
    "fresh optimizer": ({}, {"no_load_optim": True, "no_load_rng": True}),
    "pretrained": ({"no_save_optim": True}, {"pretrained_checkpoint": True}),
    "another iteration": ({}, {"override_ckpt_iteration": 2}),
    "main values": (
        {"bf16": None, "ckpt_format": "torch"},
        {"ckpt_format": "torch", "load_main_params_from_ckpt": True, "no_load_optim": True},
    ),
}


@pytest.mark.parametrize("way", one_of_each(list(BEGINNINGS), {1}))
def test_a_peer_begins_with_a_checkpoint_as_a_stock_job_does(make_service: MakeService, tmp_path: Path, way: str):
    saving, reading = BEGINNINGS[way]
    kind: Kind = ("single", "bf16-distopt", 1)
    service = make_service({"demo": SINGLE_PEER})
    service.start()
    folder = os.fspath(tmp_path)
    saving = {**ALONE, "save": folder, "save_interval": 100, "exit_interval": 4, **saving}
    run_pretrain(job_arguments(service, "none", kind, **saving), 1)
    where = {"pretrained_checkpoint": folder} if "pretrained_checkpoint" in reading else {"load": folder}
    options: Options = {**reading, **where}
    stock = run_pretrain(job_arguments(service, "none", kind, **{**options, **ALONE}), 1, probe=values_held)
    peer = run_job(service, "a", kind, **{**options, "sync_service_peers": 1})
    assert peer[0].losses == stock[0].losses
    assert peer[0].parameters == stock[0].parameters and peer[0].optimizer == stock[0].optimizer
