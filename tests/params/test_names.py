# SPDX-License-Identifier: Apache-2.0

import subprocess
import sys

import pytest

from megatron_ext.params import GptShape, Layout, Placement, global_name
from tests.support.distributed import REPOSITORY

LOCAL_AND_TE_NAMES = [
    # (local implementation, Transformer Engine, global name) on a chunk that starts at layer 4, expert 6
    (
        "decoder.layers.1.input_layernorm.weight",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.5.input_layernorm.weight",
    ),
    (
        "decoder.layers.1.input_layernorm.bias",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_bias",
        "decoder.layers.5.input_layernorm.bias",
    ),
    (
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.4.pre_mlp_layernorm.weight",
    ),
    (
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.4.mlp.linear_fc1.weight",
    ),
    (
        "decoder.layers.12.mlp.experts.local_experts.11.linear_fc1.weight",
        "decoder.layers.12.mlp.experts.linear_fc1.weight11",
        "decoder.layers.16.mlp.experts.17.linear_fc1.weight",
    ),
    (
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.bias",
        "decoder.layers.0.mlp.experts.linear_fc2.bias0",
        "decoder.layers.4.mlp.experts.6.linear_fc2.bias",
    ),
    (
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.4.mlp.shared_experts.linear_fc1.weight",
    ),
    (
        "embedding.word_embeddings.weight",
        "embedding.word_embeddings.weight",
        "embedding.word_embeddings.weight",
    ),
]


@pytest.mark.parametrize(("local", "transformer_engine", "expected"), LOCAL_AND_TE_NAMES)
def test_both_layer_implementations_have_the_same_global_names(
    local: str, transformer_engine: str, expected: str
) -> None:
    assert global_name(local, first_layer=4, first_expert=6) == expected
    assert global_name(transformer_engine, first_layer=4, first_expert=6) == expected


def test_global_names_of_the_table_are_names_of_the_model() -> None:
    shape = GptShape(
        num_layers=17,
        hidden_size=4,
        ffn_hidden_size=4,
        num_attention_heads=1,
        padded_vocab_size=4,
        num_moe_experts=18,
        moe_layers=(False, True, True, True, True) + (True,) * 12,
        moe_shared_expert_intermediate_size=4,
    )
    names = Placement(shape, Layout()).by_name
    missing = [name for *_, name in LOCAL_AND_TE_NAMES if name not in names]
    assert missing == ["decoder.layers.4.mlp.linear_fc1.weight"]  # layer 4 has experts in this model


def test_the_pure_part_works_without_megatron() -> None:
    program = (
        "import sys; sys.modules['megatron'] = None\n"
        "from megatron_ext.params import GptShape, Layout, Placement\n"
        "shape = GptShape(num_layers=2, hidden_size=4, ffn_hidden_size=8, num_attention_heads=2,"
        " padded_vocab_size=8)\n"
        "print(len(Placement(shape, Layout(tp=2, pp=2)).on_rank(3)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert int(done.stdout) == 15
