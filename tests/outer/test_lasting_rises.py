# SPDX-License-Identifier: Apache-2.0
"""Runs whose norms rise for good, by the values that the README proposes: training continues."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ext.local_sgd.reporting.round_log import read_rounds
from tests.local_sgd.plain_runs import flat, model, train, wrapped
from tests.local_sgd.runs import local_run
from tests.support.distributed import run_ranks
from tests.support.every_run import one_of_each

PENALTY = {
    "skip_anomaly": True,
    "ewma_warmup_steps": 10,
    "pseudo_gradnorm_reduce": True,
    "clip_pseudo_grad": 10.0,
}
ROUNDS = 3
"""After which a level is learned, as by default."""
RISE = 20
"""The round after which the learning rate is tripled in plain runs."""


def tripled(log, fields):
    """Train for 50 rounds of two steps, the learning rate being tripled after 20; return the weights.

    Args:
        log: file for the rounds.
        fields: of `wrapped`.
    """
    dist.init_process_group("gloo")
    module = model()
    inner = torch.optim.SGD(module.parameters(), lr=0.02)
    optimizer = wrapped(inner, module, interval=2, local_sgd_round_log=log, **fields)
    train(module, optimizer, 2 * RISE, dist.get_rank())
    for group in optimizer.param_groups:
        group["lr"] *= 3
    train(module, optimizer, 100, dist.get_rank(), start=2 * RISE)
    return flat(module)


@pytest.mark.parametrize(
    ("workers", "fields"), one_of_each([(2, {}), (3, {}), (2, {"streaming": {"fragments": 2}})], {1, 2})
)
def test_a_tripled_learning_rate_skips_units_in_no_more_than_the_stated_rounds(tmp_path: Path, workers, fields):
    log = str(tmp_path / "rounds.jsonl")
    first, *others = run_ranks(tripled, workers, log, {**PENALTY, **fields})
    # With fragments workers end apart.
    assert fields or all(other == first for other in others)
    skipped = {}
    for entry in read_rounds(Path(log)):
        for unit in entry["skipped_units"]:
            skipped.setdefault(unit, []).append(entry["round"])
    assert skipped, "nothing rose"
    assert max(map(len, skipped.values())) <= ROUNDS


def test_a_learning_rate_that_warms_up_leaves_nobody_out_for_long(tmp_path: Path):
    log = tmp_path / "rounds.jsonl"
    local_run(
        "single",
        "fp32",
        workers=4,
        lr=1e-3,
        train_iters=60,
        lr_warmup_iters=120,
        lr_decay_iters=160,
        local_sgd_sync_interval=2,
        local_sgd_skip_anomaly=True,
        local_sgd_ewma_warmup_steps=10,
        local_sgd_round_log=str(log),
    )
    rejected: dict[tuple[str, int], list[int]] = {}
    rounds = read_rounds(log)
    for entry in rounds:
        for unit, workers in entry["rejected"].items():
            for worker in workers:
                rejected.setdefault((unit, worker), []).append(entry["round"])
    assert len(rounds) == 30 and rejected, "the detector has seen no rise"
    assert max(map(len, rejected.values())) <= ROUNDS
    assert any(entry["new_levels"] for entry in rounds)
