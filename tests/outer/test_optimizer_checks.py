# SPDX-License-Identifier: Apache-2.0
"""Another package's outer optimizer is tried before a run begins: wrong steps, and states that a resume would lose."""

from typing import ClassVar

import pytest
import torch

from megatron_ext.outer.optimizers.all_optimizers import OPTIMIZERS
from megatron_ext.outer.optimizers.base import OuterOptimizer
from megatron_ext.outer.optimizers.optimizer_checks import optimizer_problems
from megatron_ext.outer.optimizers.sgd import OuterSGD


class HeavyBall(OuterOptimizer):
    """Momentum, in the shortest form."""

    name = "heavy-ball"
    elementwise = True

    def __init__(self, anchors, *, lr):
        super().__init__(anchors)
        self._lr = lr
        self._buffers = [torch.zeros_like(anchor) for anchor in anchors]

    def step(self, index, part, gradient):
        buffer = self._buffers[index][part].mul_(0.9).add_(gradient)
        self._anchors[index][part].sub_(buffer, alpha=self._lr)

    def states(self, index):
        return [self._buffers[index]]

    def tensor_state(self):
        return {"buffer": self._buffers}

    def load(self, tensors, scalars):
        for buffer, loaded in zip(self._buffers, tensors.get("buffer", self._buffers), strict=True):
            buffer.copy_(loaded)


class Still(HeavyBall):
    name = "still"

    def step(self, index, part, gradient):
        self._anchors = [anchor - gradient.mean() for anchor in self._anchors]


class ByNorm(HeavyBall):
    """Divides by the norm of whatever range it is given."""

    name = "by-norm"

    def step(self, index, part, gradient):
        super().step(index, part, gradient / gradient.norm())


class Shaken(HeavyBall):
    name = "shaken"
    elementwise = False

    def step(self, index, part, gradient):
        super().step(index, part, gradient + torch.rand(gradient.shape))


class Forgets(HeavyBall):
    name = "forgets"

    def load(self, tensors, scalars):
        pass


class WantsAState(HeavyBall):
    name = "wants-a-state"

    def load(self, tensors, scalars):
        super().load({"buffer": tensors["buffer"]}, scalars)


class TakesAName(HeavyBall):
    name = "takes-a-name"

    def tensor_state(self):
        return {"exact": self._buffers}


class Doubles(HeavyBall):
    name = "doubles"

    def tensor_state(self):
        return {"buffer": [buffer.double() for buffer in self._buffers]}


class Decays(HeavyBall):
    name = "decays"
    options: ClassVar = ("lr", "weight_decay")


class Everywhere(HeavyBall):
    name = "everywhere"
    refused_in: ClassVar = {}


class Unfinished(OuterOptimizer):
    name = "unfinished"

    def step(self, index, part, gradient):
        pass


class SgdAgain(OuterSGD):
    """Momentum, Nesterov, and the form for single contributions."""

    name = "sgd-again"


@pytest.mark.parametrize("name", OPTIMIZERS.own_names)
def test_our_own_pass(name):
    assert optimizer_problems(name, OPTIMIZERS.find(name)) == []


@pytest.mark.parametrize("kind", [HeavyBall, SgdAgain])
def test_so_does_a_short_one_and_one_with_all_forms(kind):
    assert optimizer_problems(kind.name, kind) == []


def test_so_does_one_that_was_written_for_torch():
    assert optimizer_problems("rprop", torch.optim.Rprop) == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (dict, "it is neither a class derived from megatron_ext.outer.optimizers.base.OuterOptimizer nor one of"),
        (Unfinished, "it lacks load, states, tensor_state"),
        (Still, "a step does not move the anchor that it is given, in place, and that one alone"),
        (ByNorm, "it is elementwise, but makes another step range by range than of the whole anchor"),
        (Shaken, "it makes another step the second time; workers would drift apart"),
        (Forgets, "after load it makes another step than the one whose state it was; a resumed run would differ"),
        (WantsAState, "load wants 'buffer' also before the first step, when there is no state; start from rest then"),
        (TakesAName, "it calls a state 'exact', which is the name of something else in checkpoints; rename it"),
        (Doubles, "its state 'buffer' is not an fp32 tensor of the shape of every anchor"),
        (Decays, "its options have 'weight_decay'; the options are lr, momentum, nesterov"),
        (Everywhere, "it claims to work in asynchronous rounds at a server, and lacks of_contributions; add it, or"),
    ],
)
def test_one_that_would_spoil_a_run_or_a_resume_is_refused(kind, said):
    (problem,) = optimizer_problems(getattr(kind, "name", "dict"), kind)
    assert said in problem


def test_its_name_is_that_of_its_entry_point():
    assert optimizer_problems("other", HeavyBall) == ["its name is 'heavy-ball'; give it that of the entry point"]
