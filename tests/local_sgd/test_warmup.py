# SPDX-License-Identifier: Apache-2.0
"""During warm-up gradients are synchronous; the anchor is taken when it ends."""

import pytest

from tests.local_sgd.runs import arguments, local_run, model_digests, worker_slices
from tests.support.presets import LAYOUTS
from tests.support.pretrain import run_pretrain


@pytest.mark.parametrize(
    ("layout", "precision", "extra"),
    [
        ("single", "fp32", {}),
        ("dp2", "bf16-distopt-overlap", {}),
        ("pp2", "bf16", {}),
        ("moe-ep2", "fp32-distopt", {}),
        ("single", "fp32-distopt", {"calculate_per_token_loss": True}),
    ],
)
def test_warmup_is_synchronous_training(layout, precision, extra):
    world = LAYOUTS[layout].world_size(2)
    options = {"train_iters": 5, **extra}
    warm = local_run(
        layout, precision, workers=2, local_sgd_warmup_steps=4, local_sgd_sync_interval=100, **options
    )
    both = arguments(layout, precision, workers=2)
    batch = int(both[both.index("--global-batch-size") + 1])
    synchronous = run_pretrain(
        arguments(layout, precision, workers=None, **{**options, "global_batch_size": batch}),
        world,
        patch="backend-only",
    )
    # Four synchronous steps and the forward pass of the fifth; each step of the line is the mean over workers.
    mean = [
        sum(values) / len(values)
        for values in zip(*[part[-1].losses for part in worker_slices(warm, layout, 2)], strict=True)
    ]
    tolerance = 1e-5 if precision.startswith("fp32") else 2e-3
    assert mean == pytest.approx(synchronous[-1].losses, rel=tolerance)
    assert [rank.grad_norms[:4] for rank in warm] == [
        pytest.approx(rank.grad_norms[:4], rel=10 * tolerance) for rank in synchronous
    ]


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_are_equal_bit_for_bit_at_the_end_of_warmup(workers):
    ranks = local_run(
        "single",
        "bf16-distopt",
        workers=workers,
        train_iters=5,
        local_sgd_warmup_steps=4,
        local_sgd_sync_interval=1,
    )
    first, *others = [model_digests(part) for part in worker_slices(ranks, "single", workers)]
    assert all(other == first for other in others)


def test_the_first_round_comes_one_interval_after_warmup():
    ranks = local_run(
        "single", "fp32", workers=2, train_iters=8, local_sgd_warmup_steps=3, local_sgd_sync_interval=2
    )
    rounds = [
        line.split("outer round: ")[1].split(" ")[0]
        for line in ranks[-1].stdout.splitlines()
        if "outer round" in line
    ]
    assert rounds == ["0", "0", "0", "0", "1", "1", "2", "2"]
