# SPDX-License-Identifier: Apache-2.0
"""Several instances of the distributed optimizer inside each worker (`--num-distributed-optimizer-instances`)."""

import pytest

from tests.local_sgd.runs import arguments, model_digests, same_state
from tests.support.pretrain import RankOutcome, run_failing_pretrain, run_pretrain
from tests.transport.meter import crossing_calls, install_meter

TWO = {"num_distributed_optimizer_instances": 2}
# Synchronous at first; rounds after iterations 3 and 5.
ROUNDS = {"train_iters": 5, "local_sgd_warmup_steps": 1, "local_sgd_sync_interval": 2, "global_batch_size": 8}
PENALTY = {"local_sgd_pseudo_gradnorm_reduce": True, "local_sgd_clip_pseudo_grad": 0.1}
"""Rounds that weigh workers by norms, in which each element counts once."""


def run(layout: str, precision: str, ranks: int, **options: object) -> list[RankOutcome]:
    """Run two workers of half of the ranks each."""
    return run_pretrain(arguments(layout, precision, workers=2, **{**ROUNDS, **options}), ranks)


@pytest.mark.parametrize(
    ("layout", "precision", "extra"),
    [
        pytest.param("single", "fp32-distopt", PENALTY, id="replicas"),
        pytest.param(
            "moe-ep2", "fp32-distopt", {"global_batch_size": 16}, id="experts", marks=pytest.mark.slow
        ),
    ],
)
def test_workers_with_optimizer_instances_compute_what_one_has(layout, precision, extra):
    ranks = 8 if layout == "moe-ep2" else 4
    one, two = run(layout, precision, ranks, **extra), run(layout, precision, ranks, **extra, **TWO)
    # Gradients are summed in another order.
    for before, now in zip(one, two, strict=True):
        assert now.losses == pytest.approx(before.losses, rel=1e-5)
        assert now.grad_norms == pytest.approx(before.grad_norms, rel=1e-4)
    half = ranks // 2
    # The copies of a shard, in both instances and both workers, are equal.
    assert model_digests(two[:half]) == model_digests(two[half:])
    assert [rank.optimizer for rank in two[: half // 2]] == [rank.optimizer for rank in two[half // 2 : half]]
    assert [rank.parameters for rank in two[: half // 2]] == [rank.parameters for rank in two[half // 2 : half]]


@pytest.mark.parametrize("form", [{}, {"ckpt_format": "torch"}], ids=["torch_dist", "torch"])
def test_a_resume_in_mid_interval_keeps_the_bits(tmp_path, form):
    whole = run("single", "bf16-distopt", 4, save=str(tmp_path), save_interval=4, **TWO, **form)
    resumed = run("single", "bf16-distopt", 4, load=str(tmp_path), ckpt_step=4, **TWO, **form)
    assert same_state(resumed, whole)
    assert [rank.losses for rank in resumed] == [rank.losses[4:] for rank in whole]


def test_nothing_crosses_workers_between_two_rounds():
    options = {**ROUNDS, "train_iters": 6, "local_sgd_warmup_steps": 0, "local_sgd_sync_interval": 3, **TWO}
    options["log_interval"] = 100  # a line has the mean over the workers
    ranks = run_pretrain(
        arguments("single", "bf16-distopt", workers=2, **options), 4, before=install_meter, probe=crossing_calls
    )
    for rank in ranks:
        assert [index for index, calls in enumerate(rank.probe) if calls and index > 0] == [2, 5], rank.probe


@pytest.mark.parametrize(
    ("precision", "options", "said"),
    [
        ("bf16-distopt", {"num_distributed_optimizer_instances": 3}, "3 does not divide the data-parallel size"),
        ("bf16", TWO, "above 1 without --use-distributed-optimizer is not supported: "),
        (
            "bf16-distopt",
            {**TWO, "grad_reduce_in_bf16": True, "ddp_reduce_scatter_with_fp32_accumulation": True},
            "with --ddp-reduce-scatter-with-fp32-accumulation is not supported: ",
        ),
    ],
    ids=["size", "optimizer", "accumulation"],
)
def test_instances_that_cannot_be_are_refused(precision, options, said):
    exits = run_failing_pretrain(arguments("single", precision, workers=2, **ROUNDS, **options), 4)
    assert said in exits[0].stderr
    assert "Traceback" not in exits[0].stderr
