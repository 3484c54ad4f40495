# SPDX-License-Identifier: Apache-2.0
"""The configuration refuses bad values by the name of their flag, and its defaults are DiLoCo's."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.local_sgd import GTAConfig, LocalSGDConfig, OuterOptimizerConfig
from megatron_ext.outer.optimizers.all_optimizers import find_optimizer
from megatron_ext.outer.outer_optimizer import outer_optimizer_problems


def test_the_outer_optimizer_defaults_are_those_of_diloco():
    config = OuterOptimizerConfig()
    assert (config.outer_optimizer, config.learning_rate, config.outer_optimizer_momentum) == (
        "sgd",
        0.7,
        0.9,
    )
    assert config.outer_optimizer_nesterov


def test_local_sgd_is_off_by_default_and_complains_about_nothing():
    assert LocalSGDConfig().problems() == []


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"local_sgd_workers": None}, "--local-sgd-workers"),
        ({"local_sgd_workers": 0}, "--local-sgd-workers"),
        ({"local_sgd_sync_interval": 0}, "--local-sgd-sync-interval"),
        ({"local_sgd_sync_interval": -5}, "--local-sgd-sync-interval"),
        ({"local_sgd_warmup_steps": -1}, "--local-sgd-warmup-steps"),
        ({"local_sgd_round_log": " "}, "--local-sgd-round-log"),
        ({"weight_softmax_temperature": -1.0, "pseudo_gradnorm_reduce": True}, "-weight-softmax-temperature is -1.0"),
        ({"weight_softmax_temperature": 0.0, "pseudo_gradnorm_reduce": True}, "-weight-softmax-temperature is 0.0"),
        ({"ewma_threshold": -1.0, "skip_anomaly": True}, "--local-sgd-ewma-threshold is -1.0"),
        ({"ewma_threshold": 0.0, "skip_anomaly": True}, "--local-sgd-ewma-threshold"),
        ({"ewma_alpha": 1.0, "skip_anomaly": True}, "--local-sgd-ewma-alpha is 1.0; it must be above 0 and below 1"),
        ({"ewma_relative": True, "skip_anomaly": True}, "--local-sgd-ewma-relative needs at least 3 workers"),
    ],
)
def test_a_bad_value_is_named_by_its_flag(fields, flag):
    config = LocalSGDConfig(**{"use_local_sgd": True, "local_sgd_workers": 2, **fields})
    assert any(flag in problem for problem in config.problems())


def test_a_rescaled_part_is_not_divided_by_the_weights_of_those_who_are_in_it():
    sparse = {"reducer": "gta", "sparsification_method": "rescaled_random", "density": 0.25}
    (said,) = GTAConfig(consensus_method="sum", **sparse).problems(LocalSGDConfig())
    assert "rescaled_random with --local-sgd-pseudo-grad-consensus is 1 / density too large" in said
    for fits in ({}, {"consensus_method": "sum", "sparsification_method": "random"}):
        assert GTAConfig(**{**sparse, **fits}).problems(LocalSGDConfig()) == []


def test_a_value_out_of_its_range_is_complained_of_once():
    assert len(GTAConfig(density=0.0).problems(LocalSGDConfig())) == 1
    config = LocalSGDConfig(use_local_sgd=True, local_sgd_workers=2, step_weight_ratio=2.0)
    assert config.problems() == ["--local-sgd-step-weight-ratio is 2.0; it must be in 0 to 1"]


@pytest.mark.parametrize("density", [0.0, -0.5, 1.5, math.nan])
def test_a_density_outside_zero_to_one_is_refused(density):
    config = GTAConfig(reducer="gta", sparsification_method="random", density=density)
    said = f"--local-sgd-pseudo-grad-density is {density}; it must be above 0 and at most 1"
    assert config.problems(LocalSGDConfig(use_local_sgd=True, local_sgd_workers=2)) == [said]


def test_all_problems_are_reported_together():
    config = LocalSGDConfig(use_local_sgd=True, local_sgd_sync_interval=0, local_sgd_warmup_steps=-1)
    assert len(config.problems()) == 3


def test_workers_without_local_sgd_are_refused_instead_of_ignored():
    assert "--use-local-sgd" in LocalSGDConfig(local_sgd_workers=2).problems()[0]


@given(st.floats() | st.sampled_from([1e-9, 0.7, 1000.0, math.nextafter(1000.0, 2000.0)]))
def test_an_outer_learning_rate_is_accepted_only_above_zero_and_up_to_a_thousand(rate):
    problems = OuterOptimizerConfig(outer_optimizer_lr=rate).problems()
    assert bool(problems) == (not 0 < rate <= 1000)


@given(st.floats())
def test_a_momentum_is_accepted_only_in_zero_to_one(momentum):
    problems = OuterOptimizerConfig(outer_optimizer_momentum=momentum).problems()
    assert bool(problems) == (not 0 <= momentum < 1)


@pytest.mark.parametrize("name", ["rmsprop", "no.such.module.Thing", "math.sqrt", "torch.nn.Linear", ""])
def test_an_unknown_outer_optimizer_is_refused_with_the_choices(name):
    with pytest.raises(UserError, match="adamw"):
        find_optimizer(name)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"outer_optimizer": "adam"}, "--outer-optimizer adam needs --outer-optimizer-lr"),
        ({"outer_optimizer": "none", "outer_optimizer_lr": 0.7}, "--outer-optimizer-lr has no effect"),
        (
            {"outer_optimizer": "adamw", "outer_optimizer_lr": 0.1, "outer_optimizer_momentum": 0.5},
            "--outer-optimizer-momentum has no effect",
        ),
        ({"outer_optimizer": "none", "outer_optimizer_nesterov": False}, "--no-outer-optimizer-nesterov has no effect"),
        (
            {"outer_optimizer": "torch.optim.LBFGS", "outer_optimizer_lr": 0.1},
            "--outer-optimizer 'torch.optim.LBFGS' cannot make a step: TypeError",
        ),
    ],
)
def test_an_outer_optimizer_that_cannot_work_as_asked_is_refused_at_the_start(fields, said):
    problems = outer_optimizer_problems(OuterOptimizerConfig(**fields))
    assert len(problems) == 1
    assert said in problems[0]


def test_an_import_path_names_a_torch_optimizer():
    import torch

    made = find_optimizer("torch.optim.Adagrad")([torch.zeros(3)], lr=0.1)
    assert isinstance(made._optimizer, torch.optim.Adagrad)
    assert find_optimizer("torch.optim.SGD") is find_optimizer("sgd")
    assert find_optimizer("none").is_average


@pytest.mark.parametrize(
    ("fields", "weighted", "said"),
    [
        ({"reducer": None}, False, "needs --local-sgd-pseudo-grad-reducer"),
        ({"reducer": "linear"}, False, "W times too large"),
        ({"reducer": "gta", "consensus_method": "sum"}, False, "W times too large"),
        ({"reducer": "linear"}, True, "has no effect without --local-sgd-pseudo-grad-consensus"),
        ({"reducer": "gta"}, True, "has no effect without --local-sgd-pseudo-grad-consensus"),
        ({"reducer": "gta", "consensus_method": "sum"}, True, None),
    ],
)
def test_sums_in_place_of_means_are_refused_where_they_are_too_large_or_change_nothing(fields, weighted, said):
    config = LocalSGDConfig(use_local_sgd=True, local_sgd_workers=2, pseudo_gradnorm_reduce=weighted)
    problems = GTAConfig(normalize=False, **fields).problems(config)
    assert len(problems) == (said is not None)
    assert said is None or said in problems[0]
