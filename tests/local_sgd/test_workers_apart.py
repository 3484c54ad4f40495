# SPDX-License-Identifier: Apache-2.0
"""Invariant 3: between two rounds a worker is an ordinary Megatron job, and nothing crosses workers."""

import pytest

from tests.local_sgd.runs import arguments, local_run, model_digests, worker_slices
from tests.support.presets import LAYOUTS
from tests.support.pretrain import as_worker, run_pretrain
from tests.transport.meter import crossing_calls, install_meter

NEVER = 1000
REDUCED_IN_BF16 = {"grad_reduce_in_bf16": True, "ddp_reduce_scatter_with_fp32_accumulation": True}
BUCKETS = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_num_buckets": 3,
    "ddp_pad_buckets_for_high_nccl_busbw": True,
    "no_align_grad_reduce": True,
    "no_align_param_gather": True,
    "ddp_average_in_collective": True,
    "disable_gloo_process_groups": True,
}


@pytest.mark.parametrize(
    ("layout", "precision", "extra"),
    [
        ("dp2", "bf16-distopt-overlap", {}),
        ("dp2", "bf16", {}),
        ("dp2", "fp32", {}),
        ("tp2-sp", "bf16-distopt", {}),
        ("pp2", "bf16-distopt-overlap", {}),
        ("pp2-vpp2", "bf16-distopt", {"global_batch_size": 8}),
        ("moe-ep2", "bf16-distopt-overlap", {}),
        ("moe-ep2-allgather", "fp32", {}),
        ("dp2", "bf16-distopt", {"calculate_per_token_loss": True}),
        ("dp2", "bf16-distopt", {"global_batch_size": 16, "micro_batch_size": 1}),
        ("dp2", "bf16-distopt", REDUCED_IN_BF16),
        ("dp2", "bf16-distopt", BUCKETS),
    ],
    ids=lambda value: "-".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, dict) else value,
)
def test_workers_without_sync_equal_separate_jobs_by_digest(layout, precision, extra):
    together = local_run(layout, precision, workers=2, local_sgd_sync_interval=NEVER, **extra)
    alone_extra = dict(extra)
    if "global_batch_size" in alone_extra:
        alone_extra["global_batch_size"] //= 2
    for worker, ranks in enumerate(worker_slices(together, layout, 2)):
        alone = run_pretrain(
            arguments(layout, precision, workers=None, **alone_extra),
            LAYOUTS[layout].world_size(1),
            patch="backend-only",
            before=as_worker(worker, 2),
        )
        assert model_digests(ranks) == model_digests(alone)
        assert [rank.grad_norms for rank in ranks] == [rank.grad_norms for rank in alone]
        assert [rank.losses for rank in ranks] == [rank.losses for rank in alone]


@pytest.mark.parametrize("layout", ["dp2", "pp2", "moe-ep2"])
def test_steps_without_a_round_cross_workers_zero_times(layout):
    run = arguments(
        layout, "bf16-distopt-overlap", workers=2, train_iters=8, local_sgd_sync_interval=4, log_interval=100
    )
    ranks = run_pretrain(run, LAYOUTS[layout].world_size(2), before=install_meter, probe=crossing_calls)
    for rank in ranks:
        # Iteration 0 prints a line whatever the interval is, for which the last stage averages losses; iterations
        # 3 and 7 hold a round.
        assert [index for index, calls in enumerate(rank.probe) if calls and index > 0] == [3, 7], rank.probe


@pytest.mark.parametrize(
    ("options", "crossing"),
    [
        ({"skip_anomaly": True, "clip_pseudo_grad": 1.0, "codec": "int4"}, [3, 7]),
        ({"pseudo_grad_reducer": "pairwise", "evaluation": "workers"}, [3, 7]),
        ({"fragments": 2, "fragment_update_alpha": 0.5}, [1, 3, 5, 7]),
        ({"eager_updates": True, "evaluation": "workers"}, [3, 5, 7]),
    ],
    ids=["guarded codec", "pairs", "fragments", "eager"],
)
def test_no_kind_of_round_reaches_into_other_steps(options, crossing):
    own = {f"local_sgd_{name}": value for name, value in options.items()}
    run = arguments(
        "single", "bf16", workers=2, train_iters=8, local_sgd_sync_interval=4, log_interval=100, **own
    )
    for rank in run_pretrain(run, 2, before=install_meter, probe=crossing_calls):
        assert [index for index, calls in enumerate(rank.probe) if calls and index > 0] == crossing, rank.probe


def test_timers_with_barriers_stay_inside_the_worker():
    run = arguments(
        "dp2", "bf16-distopt", workers=2, local_sgd_sync_interval=NEVER, log_interval=100, timing_log_level=2
    )
    ranks = run_pretrain(run, 4, before=install_meter, probe=crossing_calls)
    assert all(not any(rank.probe[1:]) for rank in ranks)
