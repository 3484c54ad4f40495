# SPDX-License-Identifier: Apache-2.0
"""Tensors of heterogeneous models; tests/local_sgd/test_heterogeneous_layers.py holds them against live models."""

from dataclasses import replace

import pytest
import torch

from megatron_ext.params import GptShape, Layout, ParamsError, Placement, global_name, gpt_parameters, scatter
from megatron_ext.params.layer_parts import LayerBlock
from megatron_ext.params.parameter_names import checkpoint_key

BLOCKS = (
    LayerBlock(parts=("attention", "mlp"), num_query_groups=2, ffn_hidden_size=6),
    LayerBlock(parts=("mlp",)),
    LayerBlock(parts=("attention_linear", "mlp_linear")),
    LayerBlock(parts=()),
)
TINY = GptShape(
    num_layers=4,
    hidden_size=4,
    ffn_hidden_size=8,
    num_attention_heads=4,
    padded_vocab_size=8,
    gated_linear_unit=True,
    add_bias_linear=False,
    normalization="RMSNorm",
    layer_blocks=BLOCKS,
)


def test_a_layer_has_the_tensors_of_its_parts_in_its_own_sizes() -> None:
    by_layer = {layer: dict[str, tuple[int, ...]]() for layer in range(4)}
    for tensor in gpt_parameters(TINY):
        if tensor.layer is not None:
            by_layer[tensor.layer][tensor.name.removeprefix(f"decoder.layers.{tensor.layer}.")] = tensor.shape
    assert by_layer == {
        0: {
            "input_layernorm.weight": (4,),
            "self_attention.linear_proj.weight": (4, 4),
            "self_attention.linear_qkv.weight": (8, 4),
            "pre_mlp_layernorm.weight": (4,),
            "mlp.linear_fc1.weight": (12, 4),
            "mlp.linear_fc2.weight": (4, 6),
        },
        1: {"pre_mlp_layernorm.weight": (4,), "mlp.linear_fc1.weight": (16, 4), "mlp.linear_fc2.weight": (4, 8)},
        2: {
            "input_layernorm.weight": (4,),
            "self_attention.weight": (4, 4),
            "pre_mlp_layernorm.weight": (4,),
            "mlp.weight": (4, 4),
        },
        3: {},
    }


def test_tensor_parallelism_cuts_the_outputs_of_a_linear_layer() -> None:
    placement = Placement(TINY, Layout(tp=2))
    values = {tensor.name: torch.zeros(tensor.shape) for tensor in placement.tensors}
    name = "decoder.layers.2.mlp.weight"
    values[name] = torch.arange(4.0).unsqueeze(1).expand(4, 4).contiguous()
    rows = [scatter(values, placement.on_rank(rank))[name][:, 0].int().tolist() for rank in (0, 1)]
    assert rows == [[0, 1], [2, 3]]


def test_norms_that_transformer_engine_keeps_inside_a_linear_layer_have_names_of_their_own() -> None:
    for local, expected in (
        ("decoder.layers.1.self_attention.layer_norm_weight", "decoder.layers.3.input_layernorm.weight"),
        ("decoder.layers.1.mlp.layer_norm_weight", "decoder.layers.3.pre_mlp_layernorm.weight"),
    ):
        assert global_name(local, first_layer=2, first_expert=0) == expected
        # In checkpoints they are where Transformer Engine keeps them, whatever made them.
        assert checkpoint_key(local, first_layer=2, homogeneous=False, renamed={}) == local.replace("s.1.", "s.3.")


def test_layers_are_as_many_as_the_model_has() -> None:
    with pytest.raises(ParamsError, match="layer_blocks must have one entry per layer"):
        replace(TINY, num_layers=2)
    with pytest.raises(ParamsError, match="heterogeneous layers: ffn_hidden_size"):
        LayerBlock(parts=("mlp",), ffn_hidden_size=0)
