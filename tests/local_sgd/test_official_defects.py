# SPDX-License-Identifier: Apache-2.0
"""Defects of EDiT's official implementation that ours does not have, where no other test shows it.

W2   the anchor is taken after the first step and not again when warm-up ends
W12  saving a state, or meeting twice, applies the outer momentum again
W14  parameters are paired with anchors by position among those that have a gradient

Shown elsewhere:

W1   gradients that stay synchronous, or are never synchronised      test_warmup, test_workers_apart
W3   a detector that learns from what it rejected                    test_guarded_rounds
W5   sparse rounds that synchronise nothing                          test_guarded_rounds
W6   native training without an outer optimizer                      test_rounds
W7   gradients divided by all workers                                test_workers_apart
W8   verdicts and weights that differ between ranks of a worker      test_guarded_rounds, test_rounds
W9   a skipped fp16 step that takes workers out of step              test_rounds
W10  ranks of an expert-parallel group as workers                    test_workers_apart, test_rounds
W11  traffic in every step; no distributed optimizer                 test_workers_apart
W13  a learning rate that is frozen after a load                     test_plain_torch
W15  NaN that is accepted                                            test_guarded_rounds
W16  excluded workers that dilute the mean                           test_guarded_rounds
W17  weights that depend on a layer's size                           test_penalty
W20  timers that look at all ranks                                   test_logging, test_workers_apart
"""

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.test_plain_torch import wrapped
from tests.support.distributed import run_ranks


class OneStepForward(torch.optim.Optimizer):
    """Adds to every parameter that has a gradient, in warm-up 1 and later this worker's number + 1."""

    def __init__(self, parameters, warmup):
        super().__init__(parameters, {})
        self.warmup, self.steps = warmup, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        progress = 1.0 if self.steps <= self.warmup else dist.get_rank() + 1.0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter += progress


def forward(steps, warmup, clip=None):
    """Return a value after steps of 1 in warm-up, then of 1 and 2 on the two workers, with a round every 4."""
    dist.init_process_group("gloo")
    value = torch.nn.Parameter(torch.zeros(1))
    value.grad = torch.zeros(1)
    outer = {"outer_optimizer_momentum": 0.0}
    inner = OneStepForward([value], warmup)
    optimizer = wrapped(inner, interval=4, warmup=warmup, outer=outer, clip_pseudo_grad=clip)
    for _ in range(steps):
        optimizer.step()
    return float(value)


@pytest.mark.parametrize(
    ("warmup", "clip", "expected"),
    [
        # The mean progress of an interval is 6; the official value falls below that of the end of warm-up.
        (6, None, 6 + 0.7 * 6),
        (6, 1.0, 6 + 0.7 * 1),
        (0, None, 0.7 * 6),
    ],
)
def test_w2_the_first_pseudo_gradient_is_that_of_one_interval(warmup, clip, expected):
    assert run_ranks(forward, 2, warmup + 4, warmup, clip) == [pytest.approx(expected, rel=1e-5)] * 2


def asked_again_and_again():
    """Return values of a run, and of one whose state is taken three times at every step."""
    dist.init_process_group("gloo")
    found = []
    for times in (0, 3):
        value = torch.nn.Parameter(torch.zeros(1))
        value.grad = torch.zeros(1)
        optimizer = wrapped(OneStepForward([value], 0), interval=2)
        for _ in range(7):
            optimizer.step()
            for _ in range(times):
                optimizer.state_dict()
                optimizer.averager.engine.gather_anchor()
        found.append(float(value))
    return found


def test_w12_asking_for_the_state_moves_nothing():
    for plain, asked in run_ranks(asked_again_and_again, 2):
        assert plain == asked


def without_some_gradients():
    """Return three values of which the first never has a gradient on worker 1, and the last on neither."""
    dist.init_process_group("gloo")
    values = [torch.nn.Parameter(torch.full((2,), float(number))) for number in range(3)]
    for number, value in enumerate(values):
        if number == 1 or (number == 0 and dist.get_rank() == 0):
            value.grad = torch.zeros(2)
    optimizer = wrapped(OneStepForward(values, 0), interval=2, outer={"outer_optimizer": "none"})
    for _ in range(2):
        optimizer.step()
    return [value.tolist() for value in values]


def test_w14_parameters_without_a_gradient_keep_their_anchors():
    # Worker 0 moves the first by 2, worker 1 does not; they move the second by 2 and by 4.
    assert run_ranks(without_some_gradients, 2) == [[[1.0, 1.0], [4.0, 4.0], [2.0, 2.0]]] * 2
