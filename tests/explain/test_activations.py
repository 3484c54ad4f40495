# SPDX-License-Identifier: Apache-2.0
"""Activations of layers that Megatron's formula does not know."""

import argparse
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.explain.activations import activations, kept_bytes
from megatron_ext.explain.step_traffic import activation_traffic
from megatron_ext.params import GptShape, LatentAttention
from megatron_ext.params.attention_variants import DeltaNet, SparseIndexer
from megatron_ext.params.layer_parts import LayerBlock
from megatron_ext.params.state_space import StateSpace

ASKED: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
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
    "moe_router_topk": 2,
}
POSITIONS = 32 * 2
DENSE = GptShape(num_layers=8, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, padded_vocab_size=128)
EXPERTS = replace(DENSE, num_moe_experts=4, moe_ffn_hidden_size=96)
FULL = {"recompute_granularity": "full"}


def asked(**changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**ASKED, **changed})


def found(shape: GptShape | None = DENSE, micro_batches: int = 4, **changed: Any) -> int:
    return activations(asked(**changed), shape, micro_batches).nbytes


def test_a_layer_with_experts_keeps_a_copy_of_a_token_for_each_of_its_experts() -> None:
    assert kept_bytes(DENSE, 2) == 18 * 64 + 4 * 256
    assert kept_bytes(EXPERTS, 2) == 18 * 64 + 2 * (4 * 96 + 2 * 64)
    gated = replace(EXPERTS, gated_linear_unit=True, moe_shared_expert_intermediate_size=32)
    assert kept_bytes(gated, 2) == 18 * 64 + 2 * (6 * 96 + 2 * 64) + 6 * 32
    dense, mixture = 4 * 256, 2 * (4 * 96 + 2 * 64)
    some = replace(EXPERTS, moe_layers=(False, *[True] * 7))
    assert kept_bytes(some, 2) == 18 * 64 + dense / 8 + mixture * 7 / 8


def test_latent_experts_keep_copies_of_their_own_width_and_what_is_projected_up() -> None:
    assert kept_bytes(replace(EXPERTS, moe_latent_size=16), 2) == 18 * 64 + 2 * (4 * 96 + 2 * 16) + 2 * 16


LATENT = LatentAttention(q_lora_rank=24, kv_lora_rank=20, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6)
LATENT_BYTES = 2 * (2 * (24 + 20) + 4 + 4 * (2 * 12 + 2 * 6))


def test_latent_attention_keeps_its_latents_and_the_heads_own_sizes() -> None:
    shape = replace(DENSE, latent_attention=LATENT)
    assert kept_bytes(shape, 0) == 10 * 64 + LATENT_BYTES + 4 * 256
    sparse = replace(shape, sparse_indexer=SparseIndexer(heads=2, head_dim=8))
    assert kept_bytes(sparse, 0) - kept_bytes(shape, 0) == 2 * (2 * 2 * 8 + 2 * 8 + 2)


DELTA_NET = DeltaNet(key_heads=2, value_heads=4, key_head_dim=8, value_head_dim=4)
STATE_SPACE = StateSpace(heads=6, head_dim=8, groups=2, state_dim=16)
# Projected, convolved, and the result before and after its norm.
DELTA_NET_BYTES = 2 * ((16 + 16 + 16 + 16 + 4 + 4) + (16 + 16 + 16) + 2 * 16)
STATE_SPACE_BYTES = 2 * ((48 + 48 + 32 + 32 + 6) + (48 + 32 + 32) + 2 * 48)


def test_layers_of_a_hybrid_model_are_one_part_each() -> None:
    shape = replace(
        DENSE,
        num_layers=4,
        layer_kinds=("state_space", "delta_net", "attention", "mlp"),
        state_space=STATE_SPACE,
        delta_net=DELTA_NET,
    )
    parts = STATE_SPACE_BYTES + DELTA_NET_BYTES + 8 * 64 + 4 * 256
    assert kept_bytes(shape, 0) == (4 * 5 * 64 + parts) / 4
    # What is outside of a part's products is whole on every tensor-parallel rank without sequence parallelism.
    given = {"num_layers": 4, "tensor_model_parallel_size": 2}
    assert found(shape, **given, sequence_parallel=False) - found(shape, **given) == POSITIONS * 4 * 5 * 64 // 2


def test_a_delta_net_stands_in_place_of_attention() -> None:
    shape = replace(DENSE, delta_net=replace(DELTA_NET, layers=(True,) * 4 + (False,) * 4))
    assert kept_bytes(shape, 0) == kept_bytes(DENSE, 0) + (DELTA_NET_BYTES - 8 * 64) / 2


def test_layers_of_a_heterogeneous_model_keep_what_their_own_parts_do():
    blocks = (
        LayerBlock(parts=("attention", "mlp"), ffn_hidden_size=96),
        LayerBlock(parts=("attention_linear",)),
        LayerBlock(parts=()),
        LayerBlock(parts=("mlp",)),
    )
    parts = (13 * 64) + (5 * 64 + 4 * 96) + 5 * 64 + (5 * 64 + 4 * 256)
    assert kept_bytes(replace(DENSE, num_layers=4, layer_blocks=blocks), 0) == parts / 4


def sent(shape: GptShape, **changed: Any) -> dict[str, int]:
    """What a rank with all layers sends of one micro-batch, by cause."""
    given = asked(**{**TRAFFIC, **changed})
    parts = [part for layer in range(shape.num_layers) for part in shape.parts_of(layer)]
    return {
        use.cause.partition(" (")[0]: use.nbytes
        for use in activation_traffic(given, shape, parts, stage=0, micro_batches=1)
    }


TRAFFIC: dict[str, Any] = {
    "hidden_size": 64,
    "expert_model_parallel_size": 1,
    "params_dtype": torch.bfloat16,
    "group_query_attention": False,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "multi_latent_attention": False,
    "cp_comm_type": "p2p",
}
MESSAGE = POSITIONS * 64 * 2


def test_each_part_of_a_layer_is_reduced_forward_and_backward() -> None:
    hybrid = replace(DENSE, layer_kinds=("attention", "mlp") * 4)
    assert sent(DENSE, tensor_model_parallel_size=2)["activations"] == 8 * 4 * MESSAGE
    assert sent(hybrid, tensor_model_parallel_size=2)["activations"] == 8 * 2 * MESSAGE


def test_latent_experts_get_tokens_of_their_own_width() -> None:
    whole = sent(EXPERTS, expert_model_parallel_size=2)["tokens to experts and back"]
    assert whole == 8 * 4 * MESSAGE * 2 // 2
    latent = sent(replace(EXPERTS, moe_latent_size=16), expert_model_parallel_size=2)
    assert latent["tokens to experts and back"] == whole // 4


def test_only_attention_sends_keys_and_values_round() -> None:
    softmax = sent(DENSE, context_parallel_size=2)["keys and values"]
    assert softmax == 8 * (POSITIONS // 2) * 3 * (4 * 32) * 2
    half = replace(DENSE, delta_net=replace(DELTA_NET, layers=(True,) * 4 + (False,) * 4))
    scans = 4 * (POSITIONS // 2) * (72 + 16) * 2
    assert sent(half, context_parallel_size=2)["keys and values"] == softmax // 2 + scans


def test_sparse_attention_gathers_latents_and_not_heads() -> None:
    shape = replace(DENSE, latent_attention=LATENT, sparse_indexer=SparseIndexer(heads=2, head_dim=8))
    sizes = {"multi_latent_attention": True, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6}
    found = sent(shape, context_parallel_size=2, tensor_model_parallel_size=2, **sizes)
    # On every tensor-parallel rank the same.
    assert found["keys and values"] == 8 * (POSITIONS // 2) * 2 * (20 + 4 + 8) * 2


def test_without_sequence_parallelism_a_part_is_whole_on_every_rank() -> None:
    split = found(EXPERTS, tensor_model_parallel_size=2)
    whole = found(EXPERTS, tensor_model_parallel_size=2, sequence_parallel=False)
    assert whole - split == POSITIONS * 8 * 10 * 64 // 2


@pytest.mark.parametrize("shape", [DENSE, EXPERTS, None])
@pytest.mark.parametrize("layout", [{}, {"pipeline_model_parallel_size": 4}])
def test_full_recomputation_keeps_inputs_and_one_unit(shape: GptShape | None, layout: dict[str, Any]) -> None:
    selective = {key: found(shape, **layout, num_layers=key) for key in (0, 8)}
    layer = (found(shape) - found(shape, num_layers=0)) / 8
    if shape is not EXPERTS:  # Megatron's other formula, with a twentieth more
        selective = {key: found(shape, **layout, num_layers=key, sequence_parallel=False) for key in (0, 8)}
        layer = (found(shape, sequence_parallel=False) - found(shape, num_layers=0, sequence_parallel=False)) / 8
    inputs = 8 * POSITIONS * 2 * 64
    # By uniform units of one layer and of two, and by blocks of all of a stage's layers and half of them.
    one = found(shape, **layout, **FULL)
    assert one == pytest.approx(selective[0] + inputs + layer, abs=2)
    two = found(shape, **layout, **FULL, recompute_method="uniform", recompute_num_layers=2)
    assert two == pytest.approx(selective[0] + inputs / 2 + 2 * layer, abs=2)
    stage = 8 // layout.get("pipeline_model_parallel_size", 1)
    assert found(shape, **layout, **FULL, recompute_method="block", recompute_num_layers=stage) == one
    half = found(shape, **layout, **FULL, recompute_method="block", recompute_num_layers=stage // 2)
    assert half == pytest.approx((one + selective[8] + layer) / 2, abs=2)
