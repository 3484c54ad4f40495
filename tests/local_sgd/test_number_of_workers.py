# SPDX-License-Identifier: Apache-2.0
"""Without --local-sgd-workers there are as many workers as the layout allows."""

import argparse

import pytest

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.arguments import complete_arguments
from tests.local_sgd.runs import arguments, same_state
from tests.support.pretrain import run_failing_pretrain, run_pretrain


def completed(*, ranks, tp=1, pp=1, cp=1, ep=1, etp=None, experts=None, workers=None, strategies=None):
    """Return the number of workers of a run that does not give it."""
    args = argparse.Namespace(
        use_local_sgd=True,
        local_sgd_workers=workers,
        world_size=ranks,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_experts=experts,
        hot_switch_strategies=strategies,
        hot_switch_strategy_file=None,
    )
    complete_arguments(args)
    return args.local_sgd_workers


@pytest.mark.parametrize(
    ("workers", "layout"),
    [
        (4, {"ranks": 4}),
        (2, {"ranks": 8, "tp": 2, "pp": 2}),
        (2, {"ranks": 8, "tp": 2, "cp": 2}),
        (2, {"ranks": 8, "ep": 4, "experts": 8}),
        (4, {"ranks": 8, "tp": 2, "ep": 2, "etp": 1, "experts": 8}),
        (2, {"ranks": 8, "tp": 2, "ep": 2, "experts": 8}),
        (3, {"ranks": 8, "workers": 3}),
        (None, {"ranks": 8, "strategies": ["1,4,2"]}),
    ],
)
def test_every_worker_is_as_small_as_its_groups_allow(workers, layout):
    assert completed(**layout) == workers


def test_one_worker_is_refused_with_what_makes_more():
    with pytest.raises(UserError, match="take all of the 4 processes, which are one worker; start more"):
        completed(ranks=4, tp=2, pp=2)


def test_a_run_without_the_number_is_that_with_the_largest():
    given = arguments("single", "fp32", workers=2, local_sgd_sync_interval=2)
    left_out = arguments("single", "fp32", workers=2, local_sgd_sync_interval=2, local_sgd_workers=None)
    assert "--local-sgd-workers" not in left_out
    assert same_state(run_pretrain(given, 2), run_pretrain(left_out, 2))


def test_strategies_need_the_number_of_workers_they_are_for():
    options = arguments("single", "fp32", workers=2, local_sgd_workers=None)
    lines = [*options, "--hot-switch-strategies", "1,2,1", "2,1,1", "--hot-switch-bucket-sizes", "32", "16", "0"]
    failed = run_failing_pretrain(lines, 2)
    assert "needs --local-sgd-workers W where strategies are switched" in "".join(rank.stderr for rank in failed)
