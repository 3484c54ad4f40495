# SPDX-License-Identifier: Apache-2.0
"""Strategies inside the workers of local SGD: each worker switches as a job of its own would."""

import os

import pytest

from tests.hot_switch.runs import (
    COMMON,
    arguments,
    assert_equal_except_for_rounding,
    assert_resumed,
    full_parameters,
    same_weights,
)
from tests.local_sgd.runs import model_digests
from tests.support.every_run import one_of_each
from tests.support.presets import MOE, toy_gpt
from tests.support.pretrain import run_pretrain
from tests.transport.meter import crossing_calls, install_meter

HOT = (["1,1,2", "2,1,1", "1,2,1"], [32, 16, 8, 0])
STATIC = (["1,1,2"], [32, 0])
"""Of a worker of two ranks, which are not next to each other: home has two stages."""
WORKERS = {"use_local_sgd": True, "local_sgd_workers": 2, "local_sgd_sync_interval": 3, "train_iters": 6}


def run_workers(strategies, buckets, *, probe=full_parameters, before=(), **options):
    """Train two workers of two ranks each."""
    return run_pretrain(arguments(strategies, buckets, **{**WORKERS, **options}), 4, probe=probe, before=before)


def test_workers_that_never_meet_switch_like_separate_jobs():
    never = {"local_sgd_sync_interval": 1000, "train_iters": 3, "bf16": True, "use_distributed_optimizer": True}
    together = run_workers(*HOT, probe=None, **never)
    for worker in range(2):
        alone = run_pretrain(
            arguments(*HOT, train_iters=3, global_batch_size=4, bf16=True, use_distributed_optimizer=True),
            2,
            before=share_of_worker(worker),
        )
        ranks = [together[worker], together[2 + worker]]
        assert model_digests(ranks) == model_digests(alone)
        assert [rank.losses for rank in ranks] == [rank.losses for rank in alone]


def share_of_worker(worker):
    """Let a job read what a worker of two reads in every step."""
    return read_first_share if worker == 0 else read_second_share


def read_first_share():
    _read_share(0)


def read_second_share():
    _read_share(1)


def _read_share(worker):
    from megatron_ext.hot_switch.data.batches import BatchReader

    plan = BatchReader.plan
    BatchReader.plan = lambda self, consumed, size: plan(self, 2 * consumed + worker * size, size)


@pytest.mark.parametrize(
    "options",
    one_of_each(
        [
            {},
            {"local_sgd_warmup_steps": 2, "use_distributed_optimizer": True, "overlap_grad_reduce": True},
            {"optimizer": "muon", "muon_fp32_matmul_prec": "high"},
        ],
        {1},
    ),
    ids=["from the start", "after a synchronous warm-up", "Muon"],
)
def test_strategies_change_no_round(options):
    assert_equal_except_for_rounding(run_workers(*HOT, **options), run_workers(*STATIC, **options))


HOME = "{dp: 2, tp: 1, pp: 1, ep: 2}"
GUESTS = ["{dp: 1, tp: 1, pp: 2, ep: 1}", "{dp: 1, tp: 2, pp: 1, ep: 2, etp: 1, sequence_parallel: true}"]


def test_experts_switch_inside_workers(tmp_path):
    # The z loss, unlike the balancing loss, does not depend on what shares a micro-batch.
    options = {**MOE, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.1, "disable_bias_linear": True}
    options |= {**WORKERS, "use_distributed_optimizer": True}
    runs = []
    for name, strategies, buckets in (("hot", [HOME, *GUESTS], [32, 16, 8, 0]), ("static", [HOME], [32, 0])):
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"bucket_sizes: {buckets}\nstrategies: [{', '.join(strategies)}]\n")
        command = toy_gpt(COMMON, options, hot_switch_strategy_file=os.fspath(file))
        runs.append(run_pretrain(command, 4, probe=full_parameters))
    assert_equal_except_for_rounding(*runs)


def test_parts_of_rows_stay_inside_workers(tmp_path):
    options = {**WORKERS, "use_distributed_optimizer": True}
    runs = []
    for name, strategies, buckets in (
        ("hot", "{dp: 1, tp: 1, pp: 1, cp: 2}, {dp: 1, tp: 2, pp: 1}", [32, 12, 0]),
        ("static", "{dp: 2, tp: 1, pp: 1}", [32, 0]),
    ):
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"bucket_sizes: {buckets}\nstrategies: [{strategies}]\n")
        command = toy_gpt(COMMON, options, hot_switch_strategy_file=os.fspath(file))
        runs.append(run_pretrain(command, 4, probe=full_parameters, before=same_weights))
    assert_equal_except_for_rounding(*runs)


def test_workers_resume_in_mid_interval_with_the_same_bits(tmp_path):
    options = {"bf16": True, "use_distributed_optimizer": True, "hidden_dropout": 0.1, "train_iters": 5}
    through = run_workers(*HOT, probe=None, save=os.fspath(tmp_path), save_interval=2, **options)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = run_workers(*HOT, probe=None, load=os.fspath(tmp_path), **options)
    assert_resumed(resumed, through, after=2)


def test_only_rounds_cross_workers():
    run = run_workers(*HOT, probe=crossing_calls, before=install_meter, log_interval=100)
    for rank in run:
        # Iteration 0 prints a line whatever the interval is; iterations 2 and 5 hold a round.
        assert [index for index, calls in enumerate(rank.probe) if calls and index > 0] == [2, 5], rank.probe
