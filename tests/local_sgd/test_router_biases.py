# SPDX-License-Identifier: Apache-2.0
"""Biases of routers, which no optimizer trains: each worker's own between rounds, their mean after one."""

import numpy as np
import pytest

from tests.local_sgd.runs import arguments, same_state, worker_slices
from tests.support.every_run import one_of_each
from tests.support.presets import LAYOUTS
from tests.support.pretrain import as_worker, run_pretrain

LAYOUT, PRECISION = "moe-ep2", "bf16-distopt-overlap"
BIASED = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.03,
    "moe_aux_loss_coeff": 0.0,
}
BY_QUANTILES = {
    "moe_router_load_balancing_type": "quantile_balancing",
    "moe_router_quantile_balancing_ema": 0.5,
    "moe_aux_loss_coeff": 0.0,
}
BOTH_KINDS = pytest.mark.parametrize("biased", [BIASED, BY_QUANTILES], ids=["by counts", "by quantiles"])


def biases(model, optimizer, args):
    """Probe: return the biases of this rank's routers."""
    ending = ("expert_bias", "qb_beta")
    return [router.tolist() for chunk in model for name, router in chunk.named_buffers() if name.endswith(ending)]


def run(workers, *, ranks=None, patch="script", before=(), biased=BIASED, **options):
    command = arguments(LAYOUT, PRECISION, workers=workers, **{**biased, **options})
    world_size = ranks or LAYOUTS[LAYOUT].world_size(workers or 1)
    return run_pretrain(command, world_size, probe=biases, patch=patch, before=before)


def same(left, right):
    return same_state(left, right) and [rank.probe for rank in left] == [rank.probe for rank in right]


@BOTH_KINDS
def test_a_round_takes_the_mean_of_the_workers_biases(biased):
    apart = [
        run(None, patch="backend-only", before=as_worker(worker, 2), train_iters=3, biased=biased)
        for worker in range(2)
    ]
    assert apart[0][0].probe != apart[1][0].probe
    unmet = run(2, train_iters=3, local_sgd_sync_interval=100, biased=biased)
    for ranks, alone in zip(worker_slices(unmet, LAYOUT, 2), apart, strict=True):
        assert same(ranks, alone)
    met = run(2, train_iters=3, local_sgd_sync_interval=3, biased=biased)
    mean = (np.float32(apart[0][0].probe) + np.float32(apart[1][0].probe)) / 2
    assert len(mean) == 2
    assert all(np.array_equal(np.float32(rank.probe), mean) for rank in met)


# Quantiles feel in which order gradients were added up, so that they are compared after the first step.
@pytest.mark.parametrize(("biased", "steps"), [(BIASED, 6), (BY_QUANTILES, 1)], ids=["by counts", "by quantiles"])
def test_in_warmup_the_tokens_of_all_workers_count(biased, steps):
    common = {"global_batch_size": 8, "train_iters": 7, "exit_interval": steps, "biased": biased}
    stock = run(None, ranks=4, patch="backend-only", **common)
    warm = run(2, local_sgd_warmup_steps=6, **common)
    assert [rank.probe for rank in warm] == [rank.probe for rank in stock]
    assert any(any(row) for row in warm[0].probe)


@pytest.mark.parametrize(
    "options",
    one_of_each(
        [
            {},
            {"biased": BY_QUANTILES},
            {"local_sgd_sync_in_forward": True},
            {"local_sgd_fragments": 2, "local_sgd_fragment_sync_delay": 1, "local_sgd_evaluation": "workers"},
        ],
        {1, 2},
    ),
    ids=["at once", "by quantiles", "in forward", "streaming"],
)
def test_a_resume_in_mid_interval_keeps_the_bits(tmp_path, options):
    options = {"train_iters": 8, "local_sgd_warmup_steps": 1, "local_sgd_sync_interval": 3, **options}
    whole = run(2, save=str(tmp_path), save_interval=1, **options)
    for iteration in (5, 7):
        assert same(run(2, load=str(tmp_path), ckpt_step=iteration, **options), whole)
