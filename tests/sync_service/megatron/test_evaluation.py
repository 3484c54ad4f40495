# SPDX-License-Identifier: Apache-2.0
"""Peers that evaluate on the whole validation set (`--full-validation`), of which each has all samples."""

import re
from collections.abc import Callable
from pathlib import Path

from tests.support.corpus import make, write_json_lines
from tests.support.presets import Options
from tests.support.pretrain import RankOutcome, run_pretrain
from tests.sync_service.jobs import ALONE, SINGLE, job_arguments, run_job, start_job
from tests.sync_service.service import Service

MakeService = Callable[..., Service]


def validation_losses(ranks: list[RankOutcome]) -> dict[int, str]:
    """Return the losses as the log prints them, by iteration."""
    said = "\n".join(rank.stdout for rank in ranks)
    lines = re.findall(r"validation\S* loss at iteration (\d+)[^|]*\| lm loss value: (\S+)", said)
    return {int(iteration): loss for iteration, loss in lines}


def corpora(folder: Path) -> Options:
    """Return the options of a run on a training set and a validation set of 9 documents."""
    prefixes = {}
    for name, documents in (("train", 40), ("valid", 9)):
        texts = [f"{name} {number} " * 8 for number in range(documents)]
        make(write_json_lines(folder / f"{name}.jsonl", texts), folder / name)
        prefixes[f"{name}_data_path"] = [str(folder / name)]
    return {**prefixes, "mock_data": None, "vocab_size": 263, "data_cache_path": str(folder / "cache")}


def test_peers_evaluate_on_the_whole_validation_set_as_a_stock_job_does(make_service: MakeService, tmp_path: Path):
    sgd = {"outer_optimizer": "sgd", "outer_optimizer_lr": 0.7, "outer_optimizer_momentum": 0.9}
    service = make_service({"demo": {"peers": 2, **sgd}, "alone": {"peers": 1, "outer_optimizer": "none"}})
    service.start()
    options = {**corpora(tmp_path), "full_validation": True, "multiple_validation_sets": True, "eval_interval": 2}
    jobs = [start_job(service, name, SINGLE, sync_service_index=index, **options) for index, name in enumerate("ab")]
    first, second = (validation_losses(job.result()) for job in jobs)
    # Rounds come after iterations 4 and 8, before their evaluation: it is the same on the same weights alone.
    assert first.keys() == second.keys() == {2, 4, 6, 8}
    assert {iteration for iteration in first if first[iteration] == second[iteration]} == {4, 8}
    peer = run_job(service, "a", SINGLE, **{**options, "sync_service_run": "alone", "sync_service_peers": 1})
    stock = run_pretrain(job_arguments(service, "none", SINGLE, **{**options, **ALONE}), 1)
    assert validation_losses(peer) == validation_losses(stock)
    read, expected = (re.findall(r"Evaluating on (\d+) samples", ranks[0].stdout) for ranks in (peer, stock))
    assert read == expected and len(set(read)) == 1
