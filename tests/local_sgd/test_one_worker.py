# SPDX-License-Identifier: Apache-2.0
"""One worker with an outer optimizer: outer steps in the real loop, and their state."""

import pytest

from megatron_ext.local_sgd.reporting.round_log import read_rounds
from tests.local_sgd.runs import local_run, same_state
from tests.support.pretrain import RankOutcome

# Rounds after iterations 4 and 6; the anchor is taken after 2.
SCHEDULE = {"train_iters": 7, "local_sgd_warmup_steps": 2, "local_sgd_sync_interval": 2}


def run(layout: str, precision: str, **options: object) -> list[RankOutcome]:
    return local_run(layout, precision, workers=1, **SCHEDULE, **options)


def test_outer_steps_of_one_worker_resume_bit_for_bit_in_mid_interval(tmp_path):
    nesterov = {"outer_optimizer_lr": 0.7, "outer_optimizer_momentum": 0.8, "local_sgd_clip_pseudo_grad": 0.05}
    log = tmp_path / "rounds.jsonl"
    whole = run(
        "dp2", "bf16-distopt", save=str(tmp_path), save_interval=1, local_sgd_round_log=str(log), **nesterov
    )
    assert "local SGD: 1 worker, an outer round every 2 steps after 2 synchronous iterations" in whole[0].stdout
    assert [(entry["iteration"], len(entry["worker_norms"])) for entry in read_rounds(log)] == [(4, 1), (6, 1)]
    for rank in whole[1:]:
        assert rank.losses == whole[0].losses
    resumed = run("dp2", "bf16-distopt", load=str(tmp_path), ckpt_step=5, **nesterov)
    assert same_state(resumed, whole)
    assert [rank.losses for rank in resumed] == [rank.losses[5:] for rank in whole]


def test_one_worker_whose_outer_step_goes_all_the_way_is_an_ordinary_run_up_to_rounding():
    whole_way = {"outer_optimizer_lr": 1.0, "outer_optimizer_momentum": 0.0}
    stepped, halved, ordinary = (
        run("single", "fp32", **outer)[0] for outer in (whole_way, {**whole_way, "outer_optimizer_lr": 0.5}, {})
    )
    assert stepped.losses == pytest.approx(ordinary.losses, rel=1e-5)
    assert halved.losses[:4] == ordinary.losses[:4]
    assert abs(halved.losses[4] - ordinary.losses[4]) > 1e-3
