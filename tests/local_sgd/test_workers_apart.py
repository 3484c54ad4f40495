# SPDX-License-Identifier: Apache-2.0
"""Invariant 3: between two rounds a worker is an ordinary Megatron job, and nothing crosses workers."""

import pytest

from tests.local_sgd.runs import arguments, local_run, model_digests, worker_slices
from tests.support.every_run import one_of_each
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
    one_of_each(
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
        {0, 3, 5, 6},
    ),
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


def waits_for_the_device(model, optimizer, args):
    """Probe: whether pipeline stages wait for all of the device, a round's messages included, in every exchange."""
    return model[0].config.batch_p2p_sync


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({}, True),
        ({"sync_in_forward": True}, False),
        ({"fragments": 2, "fragment_sync_delay": 1}, False),
        ({"eager_updates": True, "evaluation": "workers"}, False),
    ],
    ids=["plain", "in forward", "delayed", "eager"],
)
def test_pipeline_stages_do_not_wait_for_messages_that_nobody_awaits_yet(options, waits):
    own = {f"local_sgd_{name}": value for name, value in options.items()}
    run = arguments("pp2", "bf16", workers=2, train_iters=4, local_sgd_sync_interval=4, **own)
    assert [rank.probe for rank in run_pretrain(run, 4, probe=waits_for_the_device)] == [waits] * 4


_operations: list = []


def watch_operations():
    """Note the process group of every all-reduce and of every batch of messages."""
    import torch.distributed as dist

    reduce, exchange = dist.all_reduce, dist.batch_isend_irecv

    def watched_reduce(*args, group=None, **kwargs):
        _operations.append(("all_reduce", group))
        return reduce(*args, group=group, **kwargs)

    def watched_exchange(operations):
        _operations.append(("messages", operations[0].group))
        return exchange(operations)

    dist.all_reduce, dist.batch_isend_irecv = watched_reduce, watched_exchange


def first_across(model, optimizer, args):
    """Probe: the first operation among the workers, and whether there were messages."""
    from megatron_ext.hooks import hooks

    (feature,) = hooks.active[-1:]
    across = [name for name, group in _operations if group is feature._groups.across]
    return across[0], "messages" in across


def test_a_resumed_run_of_pairs_begins_with_what_all_workers_take_part_in(tmp_path):
    own = {"local_sgd_pseudo_grad_reducer": "pairwise", "local_sgd_evaluation": "workers", "log_interval": 100}
    common = {"workers": 3, "train_iters": 4, "local_sgd_sync_interval": 1, "global_batch_size": 6, **own}
    run_pretrain(arguments("single", "fp32", save=str(tmp_path), save_interval=2, **common), 3)
    resumed = arguments("single", "fp32", load=str(tmp_path), ckpt_step=2, **common)
    ranks = run_pretrain(resumed, 3, before=watch_operations, probe=first_across)
    assert [rank.probe[0] for rank in ranks] == ["all_reduce"] * 3
    assert any(rank.probe[1] for rank in ranks)
