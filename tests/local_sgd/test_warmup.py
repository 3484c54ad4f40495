# SPDX-License-Identifier: Apache-2.0
"""During warm-up gradients are synchronous; the anchor is taken when it ends."""

import pytest

from tests.local_sgd.runs import arguments, local_run, model_digests, worker_slices
from tests.support.every_run import one_of_each
from tests.support.presets import LAYOUTS
from tests.support.pretrain import run_pretrain


@pytest.mark.parametrize(
    ("layout", "precision", "extra"),
    one_of_each(
        [
            ("single", "fp32", {}),
            ("dp2", "bf16-distopt-overlap", {}),
            ("pp2", "bf16", {}),
            ("moe-ep2", "fp32-distopt", {}),
            ("single", "fp32-distopt", {"calculate_per_token_loss": True}),
        ],
        {1, 3, 4},
    ),
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


def test_norms_that_workers_round_differently_keep_them_equal():
    options = {"train_iters": 4, "local_sgd_warmup_steps": 3, "local_sgd_sync_interval": 1, "clip_grad": 0.1}
    ranks = run_pretrain(
        arguments("dp2", "bf16-distopt", workers=2, **options), 4, before=round_norms_differently
    )
    norms = [step.grad_norm for step in ranks[0].record.steps]
    # Every step is clipped.
    assert min(norms) > 0.1
    assert norms[:3] == [step.grad_norm for step in ranks[-1].record.steps][:3]


def round_norms_differently():
    """Before: the second worker's norms differ by what the order of additions may make of them."""
    import os

    from megatron.core.optimizer import clip_grads

    original = clip_grads.l2_norm_impl

    def l2_norm_impl(*args, **kwargs):
        norm, *rest = original(*args, **kwargs)
        return (norm * (1 + 1e-6), *rest) if os.environ["RANK"] in "23" else (norm, *rest)

    clip_grads.l2_norm_impl = l2_norm_impl


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
