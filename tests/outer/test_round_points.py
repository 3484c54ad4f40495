# SPDX-License-Identifier: Apache-2.0
"""What changes from round to round: its values, its form, and where it may begin and end."""

import pytest

from megatron_ext.local_sgd import OuterOptimizerConfig
from megatron_ext.outer.outer_optimizer import outer_optimizer_problems
from megatron_ext.outer.places import Where
from megatron_ext.outer.round_points import parse, range_problem, value_at


def test_a_value_goes_from_point_to_point_in_a_straight_line_and_stays_outside():
    points = parse("2:0.1, 4:0.7,5:0.7,9:0.3")
    assert [value_at(points, number) for number in (1, 2, 4, 5, 9, 100)] == [0.1, 0.1, 0.7, 0.7, 0.3, 0.3]
    assert value_at(points, 3) == pytest.approx(0.4)
    assert value_at(points, 7) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not ROUND:VALUE"),
        ("0.7", "'0.7' is not ROUND:VALUE"),
        ("-1:0.7", "'-1:0.7' is not ROUND:VALUE"),
        ("1:0.7,", "'' is not ROUND:VALUE"),
        ("1:", "'' is not a number"),
        ("1:nan", "'nan' is non-finite"),
        ("0:0.7", "rounds are counted from 1"),
        ("3:0.7,3:0.5", "round 3 comes after round 3; give rising rounds"),
        ("1:0.7,2:0", "the value of round 2 is 0; it must be above 0"),
        ("1:2000", "the value of round 1 is 2000; it must be above 0 and at most 1000"),
    ],
)
def test_a_text_without_a_schedule_is_refused_by_its_flag(text, said):
    (problem,) = OuterOptimizerConfig(outer_optimizer_lr_schedule=text).problems()
    assert problem.startswith("--outer-optimizer-lr-schedule ") and said in problem


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"outer_optimizer_momentum_schedule": "1:1.0"}, "the value of round 1 is 1; it must be in [0, 1)"),
        ({"outer_optimizer_lr": 0.5, "outer_optimizer_lr_schedule": "1:0.5"}, "in place of --outer-optimizer-lr; drop"),
        (
            {"outer_optimizer_momentum": 0.5, "outer_optimizer_momentum_schedule": "1:0.5"},
            "in place of --outer-optimizer-momentum; drop",
        ),
        ({"outer_optimizer": "none", "outer_optimizer_lr_schedule": "1:0.5"}, "no effect with --outer-optimizer none"),
        (
            {
                "outer_optimizer": "adam",
                "outer_optimizer_lr": 0.1,
                "outer_optimizer_momentum_schedule": "1:0.5",
            },
            "no effect with --outer-optimizer adam",
        ),
        ({"outer_optim_class": "torch.optim.SGD", "outer_optimizer_lr_schedule": "1:0.5"}, "replaces the"),
        ({"outer_optimizer_lr_schedule": 0.5}, "it is not a text"),
    ],
)
def test_a_schedule_that_has_no_effect_or_no_meaning_is_refused(fields, said):
    assert any(said in problem for problem in OuterOptimizerConfig(**fields).problems())


def test_a_schedule_replaces_the_rate_that_an_optimizer_needs():
    config = OuterOptimizerConfig(outer_optimizer="adam", outer_optimizer_lr_schedule="1:0.1,3:0.3")
    assert outer_optimizer_problems(config) == []
    assert config.learning_rate == 0.1
    assert config.options_of_round(3) == {"lr": 0.3}


def test_an_optimizer_without_a_form_for_it_is_refused():
    from megatron_ext.outer.optimizers.base import OuterOptimizer
    from megatron_ext.outer.optimizers.sgd import OuterSGD

    class Fixed(OuterSGD):
        change = OuterOptimizer.change

    assert OuterSGD.follows_schedules() and not Fixed.follows_schedules()


def test_asynchronous_rounds_which_nobody_counts_together_refuse_schedules():
    config = OuterOptimizerConfig(outer_optimizer_momentum_schedule="1:0.5")
    (problem,) = outer_optimizer_problems(config, Where.ASYNCHRONOUS)
    assert "--outer-optimizer-momentum-schedule counts rounds of all together" in problem
    assert outer_optimizer_problems(config, Where.SERVER) == []


@pytest.mark.parametrize(
    ("text", "rounds", "said"),
    [
        ("1:0.1,5:0.7", 20, None),
        ("1:0.7,20:0.1", 20, None),
        ("1:0.7,30:0.1", 20, None),
        ("1:0.7,10:0.1,20:0.1", 20, None),
        ("1:0.7,10:0.1", 20, "has decayed at round 10, and training has 20; end it at 20 or later, or add 20:0.1"),
        ("21:0.1,30:0.7", 20, "begins at round 21, after the last of training's 20"),
    ],
)
def test_a_schedule_that_decays_before_training_ends_or_begins_after_it_is_refused(text, rounds, said):
    found = range_problem(parse(text), rounds)
    assert found is None if said is None else said in found
