# SPDX-License-Identifier: Apache-2.0
"""Gradient and optimizer memory of a peer, against an optimizer that trains."""

import pytest
import torch

from megatron_ext.spes import Ownership, training_bytes

SHAPES = {
    "embedding.word_embeddings.weight": (32, 8),
    "decoder.layers.0.mlp.router.weight": (4, 8),
    **{f"decoder.layers.0.mlp.experts.{expert}.linear_fc1.weight": (16, 8) for expert in range(4)},
    **{f"decoder.layers.0.mlp.experts.{expert}.linear_fc2.weight": (8, 8) for expert in range(4)},
}


@pytest.mark.parametrize("ownership", [None, Ownership.contiguous(2, 4), Ownership.contiguous(2, 4, [1, 3])])
def test_figures_are_what_a_training_has(ownership: Ownership | None):
    parameters = {
        name: torch.nn.Parameter(torch.ones(shape), ownership is None or ownership.is_trained(name, 1))
        for name, shape in SHAPES.items()
    }
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained)
    sum(parameter.square().sum() for parameter in parameters.values()).backward()
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    found = training_bytes(SHAPES, ownership, 1, weight_bytes=4)
    assert found.weights == sum(parameter.nbytes for parameter in parameters.values())
    assert found.gradients == sum(
        parameter.grad.nbytes for parameter in parameters.values() if parameter.grad is not None
    )
    assert found.optimizer == sum(moment.nbytes for moment in moments)
    assert found.total == found.weights + found.gradients + found.optimizer


def test_half_precision_keeps_masters():
    found = training_bytes({"w": (10,)})
    assert (found.weights, found.gradients, found.optimizer) == (20, 40, 120)
