# SPDX-License-Identifier: Apache-2.0
"""Validation runs on the weights that were asked for, the log says which, and training does not notice."""

import re

import pytest

from tests.local_sgd.runs import arguments, local_run, same_state
from tests.support.corpus import make, write_json_lines
from tests.support.every_run import one_of_each
from tests.support.pretrain import run_pretrain

# A round after steps 3 and 6; validation after 4 falls into an interval.
SCHEDULE = {"train_iters": 6, "local_sgd_sync_interval": 3}
EVALUATION = {"eval_interval": 4, "eval_iters": 2}


def validation_losses(ranks):
    """Return the validation losses that the log prints, by iteration."""
    text = "\n".join(rank.stdout for rank in ranks)
    found = re.findall(r"validation loss at iteration (\d+)[^|]*\| lm loss value: (\S+)", text)
    return {int(iteration): float(loss) for iteration, loss in found}


@pytest.mark.parametrize("precision", one_of_each(["fp32", "bf16", "bf16-distopt-overlap"], {2}))
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


def test_several_whole_validation_sets_are_split_over_all_workers(tmp_path):
    prefixes = []
    for name, documents in (("small", 9), ("large", 16)):
        texts = [f"{name} {number} " * 5 for number in range(documents)]
        make(write_json_lines(tmp_path / f"{name}.jsonl", texts), tmp_path / name)
        prefixes.append(str(tmp_path / name))
    options = {
        "mock_data": None,
        "vocab_size": 263,
        "train_data_path": prefixes[1:],
        "valid_data_path": prefixes,
        "data_cache_path": str(tmp_path / "cache"),
        "full_validation": True,
        "multiple_validation_sets": True,
        "validation_set_names": ["small", "large"],
        "train_iters": 4,
        "eval_interval": 2,
        "micro_batch_size": 1,
    }
    options |= {"lr": 0.0, "min_lr": 0.0, "weight_decay": 0.0, "global_batch_size": 4}
    local = run_pretrain(arguments("single", "fp32", workers=2, local_sgd_sync_interval=3, **options), 2)
    stock = run_pretrain(arguments("single", "fp32", workers=None, **options), 2, patch="backend-only")
    found, expected = (losses_of_sets(ranks) for ranks in (local, stock))
    assert set(found) == {(name, step) for name in ("small", "large") for step in (2, 4)}
    assert found == pytest.approx(expected, rel=1e-6)


def losses_of_sets(ranks):
    """Return the losses that the log prints, by the set's name and iteration."""
    text = "\n".join(rank.stdout for rank in ranks)
    lines = re.findall(r"validation-(\w+) loss at iteration (\d+)[^|]*\| lm loss value: (\S+)", text)
    return {(name, int(step)): float(loss) for name, step, loss in lines}
