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


def biases(model, optimizer, args):
    """Probe: return the biases of this rank's routers."""
    return [router.tolist() for chunk in model for name, router in chunk.named_buffers() if "expert_bias" in name]


def run(workers, *, ranks=None, patch="script", before=(), **options):
    command = arguments(LAYOUT, PRECISION, workers=workers, **{**BIASED, **options})
    world_size = ranks or LAYOUTS[LAYOUT].world_size(workers or 1)
    return run_pretrain(command, world_size, probe=biases, patch=patch, before=before)


def same(left, right):
    return same_state(left, right) and [rank.probe for rank in left] == [rank.probe for rank in right]


def test_a_round_takes_the_mean_of_the_workers_biases():
    apart = [run(None, patch="backend-only", before=as_worker(worker, 2), train_iters=3) for worker in range(2)]
    assert apart[0][0].probe != apart[1][0].probe
    unmet = run(2, train_iters=3, local_sgd_sync_interval=100)
    for ranks, alone in zip(worker_slices(unmet, LAYOUT, 2), apart, strict=True):
        assert same(ranks, alone)
    met = run(2, train_iters=3, local_sgd_sync_interval=3)
    mean = (np.float32(apart[0][0].probe) + np.float32(apart[1][0].probe)) / 2
    assert len(mean) == 2
    assert all(np.array_equal(np.float32(rank.probe), mean) for rank in met)


def test_in_warmup_the_tokens_of_all_workers_count():
    stock = run(None, ranks=4, patch="backend-only", global_batch_size=8)
    warm = run(2, global_batch_size=8, train_iters=7, local_sgd_warmup_steps=6, exit_interval=6)
    assert [rank.probe for rank in warm] == [rank.probe for rank in stock]
    assert any(any(row) for row in warm[0].probe)


@pytest.mark.parametrize(
    "options",
    one_of_each(
        [
            {},
            {"local_sgd_sync_in_forward": True},
            {"local_sgd_fragments": 2, "local_sgd_fragment_sync_delay": 1, "local_sgd_evaluation": "workers"},
        ],
        {1},
    ),
    ids=["at once", "in forward", "streaming"],
)
def test_a_resume_in_mid_interval_keeps_the_bits(tmp_path, options):
    options = {"train_iters": 8, "local_sgd_warmup_steps": 1, "local_sgd_sync_interval": 3, **options}
    whole = run(2, save=str(tmp_path), save_interval=1, **options)
    for iteration in (5, 7):
        assert same(run(2, load=str(tmp_path), ckpt_step=iteration, **options), whole)
