# SPDX-License-Identifier: Apache-2.0
"""The learning rate of workers whose steps fp16 skips, in Megatron's loop: the others' again after every round."""

from functools import partial

import pytest

from tests.local_sgd.runs import arguments, same_state
from tests.local_sgd.test_rounds import overflow
from tests.support.pretrain import run_pretrain

SCHEDULE = {
    "fp16": True,
    "bf16": False,
    "initial_loss_scale": 2.0**10,
    "hysteresis": 1,
    "train_iters": 10,
    "lr_decay_style": "linear",
    "lr_decay_iters": 12,
    "min_lr": 0.0,
    "weight_decay": 0.1,
    "end_weight_decay": 0.3,
    "start_weight_decay": 0.1,
    "weight_decay_incr_style": "linear",
    "local_sgd_sync_interval": 4,
}


def rates(model, optimizer, args):
    """Probe: the learning rates and weight decays of all groups at the end."""
    return [(float(group["lr"]), float(group["weight_decay"])) for group in optimizer.param_groups]


def run(layout="single", precision="fp32", skipping=(1,), ranks=2, **options):
    return run_pretrain(
        arguments(layout, precision, workers=2, **{**SCHEDULE, **options}),
        ranks,
        probe=rates,
        before=partial(overflow, ranks=skipping, iterations=[2]),
    )


@pytest.mark.parametrize(
    ("given", "extra"),
    [
        (("single", "fp32", [1], 2), {}),
        pytest.param(("dp2", "bf16-distopt", [2, 3], 4), {"local_sgd_sync_in_forward": False}, id="distopt"),
        pytest.param(
            ("single", "fp32", [1], 2),
            {"local_sgd_eager_updates": True, "local_sgd_evaluation": "workers"},
            id="eager",
        ),
    ],
)
def test_a_worker_whose_step_was_skipped_has_the_others_learning_rate_after_the_next_round(given, extra):
    # Its schedule was behind to the end of the run before, without a word.
    outcomes = run(*given, **extra)
    skipped = [[step.skipped for step in rank.record.steps] for rank in outcomes]
    assert sum(skipped[0]) == 0 and sum(skipped[-1]) == 1
    assert all(rank.probe == outcomes[0].probe for rank in outcomes)
    assert outcomes[0].probe[0][0] == pytest.approx(1e-2 * (1 - 10 / 12))
    step = 4 if given[0] == "single" else 8
    said = (
        f"local SGD: the learning-rate schedule was at sample {4 * step} on worker 0 and {3 * step} on worker 1, "
        f"because steps were skipped; it is at {4 * step} on all workers now"
    )
    assert outcomes[0].stdout.count("the learning-rate schedule was at") == outcomes[0].stdout.count(said) == 1


@pytest.mark.parametrize("point", [3, 4])
def test_a_resume_around_the_round_that_lets_the_schedule_catch_up_is_exact(tmp_path, point):
    whole = run(save=str(tmp_path), save_interval=point)
    resumed = run(load=str(tmp_path), ckpt_step=point)
    assert same_state(resumed, whole)
    assert [rank.probe for rank in resumed] == [rank.probe for rank in whole]
    assert [rank.losses for rank in resumed] == [rank.losses[point:] for rank in whole]
