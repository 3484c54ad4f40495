# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention on the local implementation: gradients are those of one rank however it is cut."""

from typing import Any

import pytest
import torch

from tests.params.models import SEQUENCE, VOCABULARY, build_gpt, full_values, gather_object, load_values, start_cpu
from tests.support.distributed import run_ranks

LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "rope_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "qk_layernorm": True,
    "num_layers": 2,
}


def gradients(**layout: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of a model's first layer by global name, whole."""
    from megatron_ext.params import ParameterView, gather

    (model,) = build_gpt(**LATENT, **layout)
    view = ParameterView.from_model([model])
    load_values(view, {name: 5 * value for name, value in full_values(view.placement.tensors).items()})
    tokens = torch.arange(2 * SEQUENCE).reshape(2, SEQUENCE) * 7 % VOCABULARY
    model(tokens, torch.arange(SEQUENCE)[None], None, labels=tokens).sum().backward()
    held = gather_object([(entry.placed, entry.parameter.grad) for entry in view.entries])
    shards = [([placed for placed, _ in rank], {placed.name: grad for placed, grad in rank}) for rank in held]
    wanted = [tensor for tensor in view.placement.tensors if "self_attention.linear" in tensor.name]
    return gather(wanted, [([p for p in placed if p.tensor in wanted], values) for placed, values in shards])


def largest_difference(layout: dict[str, Any]) -> dict[str, float]:
    """Return by how much gradients differ from those of one rank, relative to the largest of the tensor."""
    start_cpu()
    cut, whole = gradients(**layout), gradients()
    assert len(whole) == 2 * 5
    return {name: float((cut[name] - value).abs().max() / value.abs().max()) for name, value in whole.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_those_of_one_rank_under_tensor_parallelism(sequence_parallel: bool):
    layout = {"tp": 2, "sequence_parallel": sequence_parallel}
    for differences in run_ranks(largest_difference, 2, layout):
        assert max(differences.values()) < 1e-4, differences
