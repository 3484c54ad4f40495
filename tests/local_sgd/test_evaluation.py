# SPDX-License-Identifier: Apache-2.0
"""Validation runs on the weights that were asked for, the log says which, and training does not notice."""

import re

import pytest

from tests.local_sgd.runs import arguments, local_run, same_state
from tests.support.pretrain import run_pretrain

# A round after steps 3 and 6; validation after 4 falls into an interval.
SCHEDULE = {"train_iters": 6, "local_sgd_sync_interval": 3}
EVALUATION = {"eval_interval": 4, "eval_iters": 2}


def validation_losses(ranks):
    """Return the validation losses that the log prints, by iteration."""
    text = "\n".join(rank.stdout for rank in ranks)
    found = re.findall(r"validation loss at iteration (\d+)[^|]*\| lm loss value: (\S+)", text)
    return {int(iteration): float(loss) for iteration, loss in found}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-distopt-overlap"])
def test_evaluation_changes_no_bit_of_training(precision):
    plain = local_run("single", precision, workers=2, **SCHEDULE)
    for mode, said in (
        ("synced", "evaluating the synced weights of round 1"),
        ("workers", "evaluating each worker's own weights"),
    ):
        evaluated = local_run("single", precision, workers=2, local_sgd_evaluation=mode, **SCHEDULE, **EVALUATION)
        assert same_state(plain, evaluated), mode
        assert said in evaluated[0].stdout


def test_synced_evaluation_with_a_codec_shows_what_all_workers_hold():
    options = {"workers": 2, "local_sgd_sync_interval": 3, "eval_iters": 2, "local_sgd_codec": "int4"}
    at_round = local_run("single", "fp32", train_iters=3, eval_interval=3, **options)
    later = local_run("single", "fp32", train_iters=4, eval_interval=4, **options)
    assert validation_losses(later)[4] == validation_losses(at_round)[3]


def test_synced_evaluation_in_mid_interval_shows_the_weights_of_the_last_round():
    # Both runs ask for two evaluations, so that their validation samples are the same ones.
    options = {"workers": 2, "local_sgd_sync_interval": 3, "eval_iters": 2}
    at_round = local_run("single", "fp32", train_iters=3, eval_interval=3, **options)
    later = local_run("single", "fp32", train_iters=4, eval_interval=4, **options)
    own = local_run("single", "fp32", train_iters=4, eval_interval=4, local_sgd_evaluation="workers", **options)
    reference, synced, workers = (
        validation_losses(at_round)[3],
        validation_losses(later)[4],
        validation_losses(own)[4],
    )
    assert synced == reference
    assert workers != reference


def test_the_loss_is_the_mean_over_all_workers_samples():
    frozen = {
        "lr": 0.0,
        "min_lr": 0.0,
        "weight_decay": 0.0,
        "train_iters": 2,
        "eval_interval": 2,
        "eval_iters": 2,
    }
    local = local_run("single", "fp32", workers=2, local_sgd_sync_interval=5, **frozen)
    stock = run_pretrain(
        arguments("single", "fp32", workers=None, global_batch_size=4, **frozen), 2, patch="backend-only"
    )
    assert validation_losses(local)[2] == pytest.approx(validation_losses(stock)[2], rel=1e-6)
