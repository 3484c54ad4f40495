# SPDX-License-Identifier: Apache-2.0
"""A heterogeneous model (Nemotron's): attention and MLPs are left out, or linear, or of other widths by layer."""

import json
from pathlib import Path
from typing import Any

from tests.support.presets import Options

LINEAR_LAYERS = Path(__file__).with_name("linear_layers.json")
"""A description of one layer, whose MLP is one linear layer."""

HETEROGENEOUS: Options = {
    "num_layers": 4,
    "swiglu": True,
    "no_bias_swiglu_fusion": True,
    "normalization": "RMSNorm",
    "group_query_attention": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "use_rotary_position_embeddings": True,
    "use_rope_scaling": True,
    "no_rope_fusion": True,
    "untie_embeddings_and_output_weights": True,
    "disable_bias_linear": True,
}
"""What Megatron asks of their command line; `heterogeneous` adds the file."""


def heterogeneous(folder: Path, *, has_linear_layers: bool = True) -> Options:
    """Write the description of the layers to a folder, and return the options of a model of them.

    Args:
        folder: where to write.
        has_linear_layers: whether linear layers stand in place of attention and of an MLP, which Megatron 0.19 cannot
            train with sequence parallelism; else the layer has a narrow MLP alone.
    """
    attention, no_attention = {"n_heads_in_group": 2}, {"n_heads_in_group": None, "no_op": True}
    linear_attention = {"n_heads_in_group": None, "replace_with_linear": True}
    # Times two thirds of the model's width, of which Megatron makes the next multiple of 256.
    mlp, wide = {"ffn_mult": 1.5}, {"ffn_mult": 12.5}
    linear_mlp, no_mlp = {"ffn_mult": None, "replace_with_linear": True}, {"ffn_mult": None, "no_op": True}
    third = _block(linear_attention, linear_mlp) if has_linear_layers else _block(no_attention, mlp)
    described = {
        "hidden_act": "silu",
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "tie_word_embeddings": False,
        "rope_theta": 10000,
        "rope_scaling": {"factor": 8.0},
        "block_configs": [
            _block(attention, mlp),
            _block(no_attention, wide),
            third,
            _block(attention, no_mlp),
        ],
    }
    file = folder / "layers.json"
    file.write_text(json.dumps(described))
    return {**HETEROGENEOUS, "heterogeneous_layers_config_path": str(file)}


def _block(attention: dict[str, Any], mlp: dict[str, Any]) -> dict[str, Any]:
    said = {"no_op": False, "replace_with_linear": False}
    return {"attention": {**said, **attention}, "ffn": {**said, **mlp}}
