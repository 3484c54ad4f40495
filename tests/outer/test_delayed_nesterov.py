# SPDX-License-Identifier: Apache-2.0
"""Delayed Nesterov against the formula of its paper, and against the synchronous optimizer."""

import pytest
import torch

from megatron_ext.outer.optimizers.delayed_nesterov import DelayedNesterov
from megatron_ext.outer.optimizers.sgd import OuterSGD

WHOLE = slice(None)


def draws(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, generator=generator) for _ in range(count)]


def test_it_does_what_the_paper_says():
    # Worked out by hand: lr 0.5, beta 0.8, N 2, gradients 1, 3, 2, 2.
    anchor = torch.tensor([10.0])
    optimizer = DelayedNesterov([anchor], lr=0.5, momentum=0.8, count=2)
    found = []
    for gradient in (1.0, 3.0, 2.0, 2.0):
        optimizer.step(0, WHOLE, torch.tensor([gradient]))
        found.append(anchor.item())
    # m = (1 + 3) / 2 = 2 after two of them, then 0.8 * 2 + (2 + 2) / 2 = 3.6.
    first = 10 - 0.25
    second = first - 0.75 - 0.5 * 0.8 * 2
    third = second - 0.5
    assert found == pytest.approx([first, second, third, third - 0.5 - 0.5 * 0.8 * 3.6], abs=1e-6)


def test_one_contribution_per_step_is_nesterov():
    delayed, plain = torch.ones(5), torch.ones(5)
    optimizer = DelayedNesterov([delayed], lr=0.7, momentum=0.9, count=1)
    other = OuterSGD([plain], lr=0.7, momentum=0.9, nesterov=True)
    for gradient in draws(6):
        optimizer.step(0, WHOLE, gradient.clone())
        other.step(0, WHOLE, gradient.clone())
    torch.testing.assert_close(delayed, plain)


def test_n_contributions_move_the_anchor_as_one_step_by_their_mean_does():
    delayed, plain = torch.ones(5), torch.ones(5)
    optimizer = DelayedNesterov([delayed], lr=0.7, momentum=0.9, count=3)
    other = OuterSGD([plain], lr=0.7, momentum=0.9, nesterov=True)
    gradients = draws(9)
    for at in range(0, 9, 3):
        for gradient in gradients[at : at + 3]:
            optimizer.step(0, WHOLE, gradient.clone())
        other.step(0, WHOLE, sum(gradients[at : at + 3]) / 3)
        torch.testing.assert_close(delayed, plain)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("done", range(5))
def test_its_state_carries_it_over_to_the_next_bit(momentum: float, done: int):
    gradients = draws(8)
    whole, anchor = torch.ones(5), torch.ones(5)
    optimizer = DelayedNesterov([whole], lr=0.7, momentum=momentum, count=3)
    for gradient in gradients:
        optimizer.step(0, WHOLE, gradient.clone())
    first = DelayedNesterov([anchor], lr=0.7, momentum=momentum, count=3)
    for gradient in gradients[:done]:
        first.step(0, WHOLE, gradient.clone())
    second = DelayedNesterov([anchor], lr=0.7, momentum=momentum, count=3)
    second.load(first.tensor_state(), first.scalar_state())
    for gradient in gradients[done:]:
        second.step(0, WHOLE, gradient.clone())
    assert torch.equal(anchor, whole)
