# SPDX-License-Identifier: Apache-2.0
"""Names: from a rank's own parameter names to global names, and to the keys of Megatron's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# The layer of the decoder's kind in each of those for multi-token prediction; checkpoints call it by its former name.
_PREDICTION = re.compile(r"(mtp\.layers\.\d+\.)mtp_model_layer\.(.+)")
# In a hybrid model that layer is several, one thing each.
_HYBRID_PREDICTION = re.compile(r"(mtp\.layers\.\d+\.mtp_model_layer\.layers\.\d+\.)(.+)")
_OF_PREDICTION = re.compile(r"mtp\.layers\.(\d+)\.(?:mtp_model_layer\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
# Transformer Engine's grouped linear keeps its experts as weight0, weight1, ... of one module.
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
_GLOBAL_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
# Transformer Engine keeps a norm inside the linear layer that follows it.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.in_proj.layer_norm_": "input_layernorm.",
    "self_attention.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "mlp.layer_norm_": "pre_mlp_layernorm.",
    "mixer.in_proj.layer_norm_": "norm.",
}
# The convolution was a module of its own before Megatron 0.19, and still is in checkpoints.
_FORMER_NAMES = {"mixer.conv1d_": "mixer.conv1d."}


def global_name(local_name: str, *, first_layer: int, first_expert: int) -> str:
    """Translate a parameter's name within a rank's model chunk to its global name.

    Knows the names of both layer implementations: the local one and Transformer Engine's (fused norms,
    grouped experts).

    Args:
        local_name: name from ``GPTModel.named_parameters()``, without the wrappers' ``module.`` prefixes.
        first_layer: global number of the chunk's first decoder layer.
        first_expert: global number of the rank's first routed expert.

    Returns:
        The global name; a name that belongs to no layer comes back unchanged.
    """
    if match := _LAYER.fullmatch(local_name):
        prefix = f"decoder.layers.{first_layer + int(match[1])}."
    elif match := _HYBRID_PREDICTION.fullmatch(local_name):
        prefix = match[1]
    elif match := _PREDICTION.fullmatch(local_name):
        prefix = f"{match[1]}mtp_model_layer."
    else:
        return local_name
    rest = match[2]
    expert = _expert_of(rest)
    if expert is not None:
        number, leaf = expert
        rest = f"mlp.experts.{first_expert + number}.{leaf}"
    return prefix + _renamed(rest, {**FUSED_NORMS, **_FORMER_NAMES})


def split_global_name(name: str) -> tuple[int | None, int | None, str]:
    """Return the decoder layer and the routed expert in a global name, None where it has none, and what follows.

    Of ``decoder.layers.7.mlp.experts.3.linear_fc1.weight`` these are 7, 3 and ``linear_fc1.weight``; of
    ``decoder.layers.7.mlp.router.weight`` 7, None and ``mlp.router.weight``.
    """
    return _split(_LAYER, name)


def split_prediction_name(name: str) -> tuple[int | None, int | None, str]:
    """Return the layer of multi-token prediction and the routed expert in a global name, as `split_global_name` does.

    What follows is the name of the layer's own (``enorm.weight``), or as in a decoder layer.
    """
    return _split(_OF_PREDICTION, name)


def _split(layers: re.Pattern[str], name: str) -> tuple[int | None, int | None, str]:
    """Return the layer that a pattern finds in a global name, the routed expert, and what follows."""
    if (match := layers.fullmatch(name)) is None:
        return None, None, name
    layer, rest = int(match[1]), match[2]
    if (expert := _GLOBAL_EXPERT.fullmatch(rest)) is None:
        return layer, None, rest
    return layer, int(expert[1]), expert[2]


def checkpoint_key(
    local_name: str, *, first_layer: int, homogeneous: bool, renamed: Mapping[str, str]
) -> str:
    """The key under which Megatron's distributed checkpoint stores a parameter.

    Args:
        local_name: as for ``global_name``.
        first_layer: global number of the chunk's first decoder layer.
        homogeneous: whether the checkpoint stacks all layers in one tensor, which leaves the layer's
            number out of the key.
        renamed: the layer's own table of renamed prefixes (``sharded_state_dict_keys_map``).

    Returns:
        The key.
    """
    if match := _LAYER.fullmatch(local_name):
        prefix = "decoder.layers." if homogeneous else f"decoder.layers.{first_layer + int(match[1])}."
    elif match := _HYBRID_PREDICTION.fullmatch(local_name):
        prefix = match[1]
    elif match := _PREDICTION.fullmatch(local_name):
        prefix = f"{match[1]}transformer_layer."
    else:
        return local_name
    rest = match[2]
    expert = _expert_of(rest)
    if expert is not None:
        rest = f"mlp.experts.experts.{expert[1]}"
    return prefix + _renamed(rest, {**renamed, **_FORMER_NAMES})


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """Return the name with what the table has for the prefix that it begins with."""
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def local_layer(local_name: str) -> int | None:
    """The layer's place within the chunk, or None for a name outside the decoder layers."""
    match = _LAYER.fullmatch(local_name)
    return None if match is None else int(match[1])


def prediction_layer(local_name: str) -> str | None:
    """The path of the layer of the decoder's kinds that multi-token prediction has there, or None elsewhere."""
    if match := _HYBRID_PREDICTION.fullmatch(local_name):
        return match[1].removesuffix(".")
    match = _PREDICTION.fullmatch(local_name)
    return None if match is None else f"{match[1]}mtp_model_layer"


def _expert_of(rest: str) -> tuple[int, str] | None:
    """Local expert number and the name within the expert, e.g. ``(2, "linear_fc1.weight")``."""
    if match := _EXPERT.fullmatch(rest):
        return int(match[1]), match[2]
    if match := _GROUPED_EXPERT.fullmatch(rest):
        return int(match[3]), f"{match[1]}.{match[2]}"
    return None
