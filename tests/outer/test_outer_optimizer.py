# SPDX-License-Identifier: Apache-2.0
"""The outer optimizers on plain tensors: torch's own results, range by range, and their state."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.local_sgd import OuterOptimizerConfig
from megatron_ext.outer.optimizers.sgd import OuterSGD
from megatron_ext.outer.outer_optimizer import build_outer_optimizer, outer_optimizer_problems


@given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    rounds=st.integers(1, 4),
    chunk=st.integers(1, 40),
    lr=st.floats(0.01, 2),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    nesterov=st.booleans(),
)
def test_sgd_is_torch_s_bit_for_bit_on_any_ranges(sizes, rounds, chunk, lr, momentum, nesterov):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(size, generator=generator) for size in sizes]
    ours, theirs = [value.clone() for value in start], [value.clone().requires_grad_() for value in start]
    nesterov = nesterov and momentum > 0
    mine = OuterSGD(ours, lr=lr, momentum=momentum, nesterov=nesterov)
    reference = torch.optim.SGD(theirs, lr=lr, momentum=momentum, nesterov=nesterov, foreach=False)
    for _ in range(rounds):
        gradients = [torch.randn(size, generator=generator) for size in sizes]
        for index, gradient in enumerate(gradients):
            theirs[index].grad = gradient.clone()
            for first in range(0, sizes[index], chunk):
                part = slice(first, min(first + chunk, sizes[index]))
                mine.step(index, part, gradient[part].clone())
        reference.step()
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", ["sgd", "torch.optim.Adam"])
def test_steps_follow_a_learning_rate_and_a_momentum_that_change_as_torchs_do(name):
    momenta = {"outer_optimizer_momentum_schedule": "1:0.2,3:0.8"} if name == "sgd" else {}
    outer = OuterOptimizerConfig(outer_optimizer=name, outer_optimizer_lr_schedule="1:0.1,3:0.5,4:0.2", **momenta)
    anchor, parameter = torch.linspace(-1, 1, 7), torch.linspace(-1, 1, 7).requires_grad_()
    ours = build_outer_optimizer(outer, [anchor])
    theirs = (
        torch.optim.SGD([parameter], lr=1.0, momentum=0.8, nesterov=True)
        if name == "sgd"
        else torch.optim.Adam([parameter], lr=1.0)
    )
    for number, (lr, momentum) in enumerate([(0.1, 0.2), (0.3, 0.5), (0.5, 0.8), (0.2, 0.8), (0.2, 0.8)], start=1):
        options = outer.options_of_round(number)
        assert options == pytest.approx({"lr": lr, "momentum": momentum} if name == "sgd" else {"lr": lr})
        gradient = torch.randn(7, generator=torch.Generator().manual_seed(number))
        ours.change(options)
        ours.step(0, slice(0, 7), gradient.clone())
        theirs.param_groups[0].update(options)
        parameter.grad = gradient
        theirs.step()
        torch.testing.assert_close(anchor, parameter.detach(), rtol=1e-6, atol=1e-7)


def test_a_momentum_that_begins_at_zero_has_learned_from_the_round_before():
    outer = OuterOptimizerConfig(outer_optimizer_lr_schedule="1:1", outer_optimizer_momentum_schedule="1:0,2:0.5")
    anchor = torch.zeros(1)
    ours = build_outer_optimizer(outer, [anchor])
    found = []
    for number, gradient in enumerate([1.0, 4.0], start=1):
        ours.change(outer.options_of_round(number))
        ours.step(0, slice(0, 1), torch.full((1,), gradient))
        found.append(float(anchor))
    # v = 1; then v = 0.5 * 1 + 4, and a step of 4 + 0.5 v.
    assert found == [-1.0, -1.0 - (4 + 0.5 * 4.5)]


@pytest.mark.parametrize(
    ("config", "states"),
    [
        ({}, {"momentum_buffer"}),
        ({"outer_optimizer_momentum": 0.0}, set()),
        ({"outer_optimizer": "none"}, set()),
        ({"outer_optimizer": "adamw", "outer_optimizer_lr": 0.7}, {"step", "exp_avg", "exp_avg_sq"}),
        ({"outer_optimizer": "torch.optim.Adagrad", "outer_optimizer_lr": 0.7}, {"step", "sum"}),
    ],
)
def test_a_state_continues_in_another_optimizer_without_sharing_memory(config, states):
    def run(optimizer, anchors, numbers):
        for number in numbers:
            for index, anchor in enumerate(anchors):
                optimizer.step(index, slice(0, anchor.numel()), torch.full_like(anchor, 0.1 * number))

    outer = OuterOptimizerConfig(**config)
    anchors = [torch.ones(5), torch.ones(3)]
    first = build_outer_optimizer(outer, anchors)
    run(first, anchors, [1, 2])
    assert set(first.tensor_state()) == states
    copies = [anchor.clone() for anchor in anchors]
    second = build_outer_optimizer(outer, copies)
    second.load(first.tensor_state(), first.scalar_state())
    run(first, anchors, [3])
    run(second, copies, [3])
    for left, right in zip(anchors, copies, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", ["sgd", "adam", "torch.optim.NAdam", "torch.optim.Rprop"])
@pytest.mark.parametrize("made", [(0, 0), (0, 2), (1, 3)])
def test_anchors_that_made_different_numbers_of_steps_resume_as_they_were(name, made):
    # A unit in which no worker counts makes no step in a round.
    outer = OuterOptimizerConfig(outer_optimizer=name, outer_optimizer_lr=0.1)
    anchors = [torch.ones(5), torch.ones(3)]
    first = build_outer_optimizer(outer, anchors)
    for index, steps in enumerate(made):
        for step in range(steps):
            first.step(index, slice(0, anchors[index].numel()), torch.full_like(anchors[index], 0.1 * (step + 1)))
    copies = [anchor.clone() for anchor in anchors]
    second = build_outer_optimizer(outer, copies)
    second.load(first.tensor_state(), first.scalar_state())
    for optimizer, values in ((first, anchors), (second, copies)):
        for index, value in enumerate(values):
            optimizer.step(index, slice(0, value.numel()), torch.arange(1.0, value.numel() + 1))
    for left, right in zip(anchors, copies, strict=True):
        assert torch.equal(left, right)


class Counting(torch.optim.SGD):
    """Keeps a counter for all parameters, as Prodigy and schedule-free optimizers do."""

    def step(self, closure=None):
        """Count."""
        self.param_groups[0]["seen"] = self.param_groups[0].get("seen", 0) + 1
        return super().step(closure)


class Renamed(torch.optim.SGD):
    """Calls its momentum like something that local SGD keeps beside it."""

    def step(self, closure=None):
        """Keep a momentum."""
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("anchor", torch.zeros_like(parameter))
            parameter.data.sub_(momentum.mul_(0.9).add_(parameter.grad), alpha=0.1)


class Coarse(torch.optim.SGD):
    """Keeps a momentum in bf16."""

    def step(self, closure=None):
        """Keep a momentum."""
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter, dtype=torch.bfloat16))
            parameter.data.sub_(momentum.mul_(0.9).add_(parameter.grad), alpha=0.1)


class Listing(torch.optim.SGD):
    """Keeps a list for a parameter."""

    def step(self, closure=None):
        """Remember the gradient's length."""
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("lengths", []).append(parameter.numel())
        return super().step(closure)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (Counting, "keeps seen for all parameters together"),
        (Listing, "'lengths' that is a list"),
        (Renamed, "calls a state 'anchor', which is the name of something else in checkpoints"),
        (Coarse, "keeps a state 'momentum' of torch.bfloat16"),
    ],
)
def test_an_optimizer_whose_state_no_checkpoint_can_hold_is_refused(chosen, said):
    config = OuterOptimizerConfig(outer_optimizer=f"{__name__}.{chosen.__name__}", outer_optimizer_lr=0.1)
    (problem,) = outer_optimizer_problems(config)
    assert said in problem


def test_a_module_that_cannot_be_imported_is_named_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "failing_outer.py").write_text("def f(:")
    monkeypatch.syspath_prepend(tmp_path)
    for name, said in (("failing_outer.Mine", "invalid syntax"), ("..foo.Bar", "relative import")):
        (problem,) = outer_optimizer_problems(OuterOptimizerConfig(outer_optimizer=name, outer_optimizer_lr=0.1))
        assert f"{name!r} cannot be imported" in problem and said in problem


@pytest.mark.parametrize("name", ["sgd", "none", "adam", "adamw", "torch.optim.RMSprop"])
def test_a_rank_that_owns_nothing_has_an_outer_optimizer_too(name):
    optimizer = build_outer_optimizer(OuterOptimizerConfig(outer_optimizer=name, outer_optimizer_lr=0.1), [])
    assert all(tensors == [] for tensors in optimizer.tensor_state().values())
    assert optimizer.scalar_state() == {}


@pytest.mark.parametrize(
    ("chosen", "arguments"),
    [
        (torch.optim.SGD, {"lr": 0.7, "momentum": 0.8, "nesterov": True}),
        (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9, "dampening": 0.1}),
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.5}),
    ],
)
@pytest.mark.parametrize("by_path", [False, True])
def test_a_class_and_its_arguments_are_taken_as_they_are(chosen, arguments, by_path):
    given = f"torch.optim.{chosen.__name__}" if by_path else chosen
    config = OuterOptimizerConfig(outer_optim_class=given, outer_optim_kwargs=arguments)
    assert outer_optimizer_problems(config) == []
    anchor, parameter = torch.ones(5), torch.nn.Parameter(torch.ones(5))
    ours, theirs = build_outer_optimizer(config, [anchor]), chosen([parameter], **arguments)
    for step in range(3):
        gradient = torch.arange(5.0) + step
        ours.step(0, slice(0, 5), gradient.clone())
        parameter.grad = gradient
        theirs.step()
    assert anchor.tolist() == parameter.tolist()


A_CLASS = {"outer_optim_class": torch.optim.SGD}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"outer_optim_kwargs": {"lr": 1.0}}, "no effect without --outer-optim-class"),
        ({"outer_optim_class": torch.optim.SGD, "outer_optimizer_momentum": 0.5}, "replaces the --outer-optimizer"),
        ({"outer_optim_class": torch.optim.SGD, "outer_optim_kwargs": {"rate": 1.0}}, "--outer-optim-class SGD"),
        ({**A_CLASS, "outer_optim_kwargs": {"lr": math.nan}}, "lr is nan; it must be a number above 0"),
        ({**A_CLASS, "outer_optim_kwargs": {"lr": True}}, "lr is True; it must be a number above 0"),
        ({**A_CLASS, "outer_optim_kwargs": {"lr": "0.1"}}, "lr is '0.1'; it must be a number above 0"),
        ({**A_CLASS, "outer_optim_kwargs": {"momentum": math.inf}}, "momentum is inf; it must be in [0, 1)"),
        ({**A_CLASS, "outer_optim_kwargs": {"lr": 1e30}}, "lr is 1e+30; it must be a number above 0"),
        ({**A_CLASS, "outer_optim_kwargs": {"lr": -0.7}}, "lr is -0.7; it must be a number above 0"),
        ({**A_CLASS, "outer_optim_kwargs": {"momentum": -0.5}}, "momentum is -0.5; it must be in [0, 1)"),
        ({**A_CLASS, "outer_optim_kwargs": {"weight_decay": math.inf}}, "weight_decay is inf; it must be finite"),
        ({**A_CLASS, "outer_optim_kwargs": {"nesterov": True}}, "--outer-optim-class SGD refused"),
        ({"outer_optim_class": torch.optim.LBFGS}, "--outer-optim-class 'torch.optim.lbfgs.LBFGS' cannot make a step"),
        ({"outer_optim_class": "SGD"}, "--outer-optim-class 'SGD' is not known; give the import path"),
        ({"outer_optim_class": "torch.nn.Linear"}, "'torch.nn.Linear' is not a torch.optim.Optimizer class"),
    ],
)
def test_a_class_that_cannot_work_as_asked_is_refused(fields, said):
    (problem,) = outer_optimizer_problems(OuterOptimizerConfig(**fields))
    assert said in problem
