# SPDX-License-Identifier: Apache-2.0
"""Activations of layers that Megatron's formula does not know."""

import argparse
from typing import Any

import pytest

from megatron_ext.explain.activations import activations, kept_bytes

ASKED: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "swiglu": False,
    "seq_length": 32,
    "micro_batch_size": 2,
    "padded_vocab_size": 128,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "sequence_parallel": True,
    "recompute_granularity": "selective",
    "recompute_method": None,
    "recompute_num_layers": None,
    "num_experts": None,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_layer_freq": 1,
    "multi_latent_attention": False,
}
POSITIONS = 32 * 2
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 96, "moe_layer_freq": [1] * 8}
FULL = {"recompute_granularity": "full"}


def asked(**changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**ASKED, **changed})


def found(micro_batches: int = 4, **changed: Any) -> int:
    return activations(asked(**changed), micro_batches).nbytes


def test_a_layer_with_experts_keeps_a_copy_of_a_token_for_each_of_its_experts():
    assert kept_bytes(asked()) == 18 * 64 + 4 * 256
    assert kept_bytes(asked(**EXPERTS)) == 18 * 64 + 2 * (4 * 96 + 2 * 64)
    gated = {**EXPERTS, "swiglu": True, "moe_shared_expert_intermediate_size": 32}
    assert kept_bytes(asked(**gated)) == 18 * 64 + 2 * (6 * 96 + 2 * 64) + 6 * 32
    dense, mixture = 4 * 256, 2 * (4 * 96 + 2 * 64)
    for frequency, share in ((4, 1 / 4), ([0, 1, 1, 1, 1, 1, 1, 1], 7 / 8)):
        expected = 18 * 64 + (1 - share) * dense + share * mixture
        assert kept_bytes(asked(**{**EXPERTS, "moe_layer_freq": frequency})) == expected


def test_latent_attention_keeps_its_latents_and_the_heads_own_sizes():
    sizes = {"num_attention_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_head_dim": 8, "v_head_dim": 6}
    latent = {"multi_latent_attention": True, "qk_pos_emb_head_dim": 4, **sizes}
    attention = 2 * (2 * (24 + 20) + 4 + 4 * (2 * 12 + 2 * 6))
    assert kept_bytes(asked(**latent)) == 10 * 64 + attention + 4 * 256


def test_without_sequence_parallelism_a_part_is_whole_on_every_rank():
    split = found(**EXPERTS, tensor_model_parallel_size=2)
    whole = found(**EXPERTS, tensor_model_parallel_size=2, sequence_parallel=False)
    assert whole - split == POSITIONS * 8 * 10 * 64 // 2


@pytest.mark.parametrize("experts", [{}, EXPERTS])
@pytest.mark.parametrize("layout", [{}, {"pipeline_model_parallel_size": 4}])
def test_full_recomputation_keeps_inputs_and_one_unit(experts: dict[str, Any], layout: dict[str, Any]):
    selective = {key: found(**experts, **layout, num_layers=key) for key in (0, 8)}
    layer = (found(**experts) - found(**experts, num_layers=0)) / 8
    if not experts:  # Megatron's other formula, with a twentieth more
        selective = {key: found(**layout, num_layers=key, sequence_parallel=False) for key in (0, 8)}
        layer = (found(sequence_parallel=False) - found(num_layers=0, sequence_parallel=False)) / 8
    inputs = 8 * POSITIONS * 2 * 64
    # By uniform units of one layer and of two, and by blocks of all of a stage's layers and half of them.
    one = found(**experts, **layout, **FULL)
    assert one == pytest.approx(selective[0] + inputs + layer, abs=2)
    two = found(**experts, **layout, **FULL, recompute_method="uniform", recompute_num_layers=2)
    assert two == pytest.approx(selective[0] + inputs / 2 + 2 * layer, abs=2)
    stage = 8 // layout.get("pipeline_model_parallel_size", 1)
    assert found(**experts, **layout, **FULL, recompute_method="block", recompute_num_layers=stage) == one
    half = found(**experts, **layout, **FULL, recompute_method="block", recompute_num_layers=stage // 2)
    assert half == pytest.approx((one + selective[8] + layer) / 2, abs=2)
