# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention on the local implementation: gradients are those of one rank however it is cut."""

from typing import Any

import torch

from tests.params.models import (
    LATENT,
    SEQUENCE,
    VOCABULARY,
    build_gpt,
    full_values,
    gather_object,
    load_values,
    start_cpu,
)
from tests.support.distributed import run_ranks


def gradients(**layout: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the projections in attention by global name, whole."""
    from megatron_ext.params import ParameterView, gather

    (model,) = build_gpt(num_layers=2, **LATENT, **layout)
    view = ParameterView.from_model([model])
    load_values(view, {name: 5 * value for name, value in full_values(view.placement.tensors).items()})
    tokens = torch.arange(2 * SEQUENCE).reshape(2, SEQUENCE) * 7 % VOCABULARY
    model(tokens, torch.arange(SEQUENCE)[None], None, labels=tokens).sum().backward()
    held = gather_object([(entry.placed, entry.parameter.grad) for entry in view.entries])
    shards = [([placed for placed, _ in rank], {placed.name: grad for placed, grad in rank}) for rank in held]
    wanted = [tensor for tensor in view.placement.tensors if "self_attention.linear" in tensor.name]
    return gather(wanted, [([p for p in placed if p.tensor in wanted], values) for placed, values in shards])


def largest_differences(layouts: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return by how much gradients differ from those of one rank, relative to the largest of the tensor."""
    start_cpu()
    whole = gradients()
    assert len(whole) == 2 * 5
    cut = [gradients(**layout) for layout in layouts]
    return [
        {name: float((found[name] - value).abs().max() / value.abs().max()) for name, value in whole.items()}
        for found in cut
    ]


def test_gradients_are_those_of_one_rank_under_tensor_and_sequence_parallelism():
    layouts = [{"tp": 2, "sequence_parallel": in_parts} for in_parts in (False, True)]
    for differences in run_ranks(largest_differences, 2, layouts):
        assert max(value for layout in differences for value in layout.values()) < 1e-4, differences
