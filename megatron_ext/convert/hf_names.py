# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's names of a model's tensors, and which of their rows are which rows of Megatron's.

Every tensor of Megatron's model is made of rows of those of Hugging Face's, in the same orientation: the fused
projection of queries, keys and values of the heads of each group in turn, the first layer of an MLP of the gate's rows
and those that are gated. So a conversion moves rows and computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_ext.params import GlobalTensor, GptShape, gpt_parameters, qkv_rows
from megatron_ext.params.parameter_names import split_global_name, split_prediction_name

__all__ = ["HfTensor", "Names", "RowRange", "hf_tensors", "parts_of", "prediction_copies"]

_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
}
_OF_PREDICTION = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}
_NORMS = {"self_attention.q_layernorm.weight": "q_norm", "self_attention.k_layernorm.weight": "k_norm"}
_LATENT = {
    "self_attention.linear_q_proj.weight": "q_proj",
    "self_attention.linear_q_down_proj.weight": "q_a_proj",
    "self_attention.q_layernorm.weight": "q_a_layernorm",
    "self_attention.linear_q_up_proj.weight": "q_b_proj",
    "self_attention.linear_kv_down_proj.weight": "kv_a_proj_with_mqa",
    "self_attention.kv_layernorm.weight": "kv_a_layernorm",
    "self_attention.linear_kv_up_proj.weight": "kv_b_proj",
}


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a family calls the parts of a mixture of experts, each below ``model.layers.N.``."""

    router: str = "mlp.gate"
    """The router."""

    experts: str = "mlp.experts"
    """The list of experts."""

    gate: str = "gate_proj"
    """The rows of an expert's first layer that gate."""

    up: str = "up_proj"
    """Those that are gated."""

    down: str = "down_proj"
    """An expert's second layer."""

    shared: str = "mlp.shared_expert"
    """The shared expert."""


@dataclass(frozen=True, kw_only=True)
class RowRange:
    """Rows of one of Hugging Face's tensors that are rows of one of Megatron's."""

    name: str
    """Of Hugging Face's tensor."""

    rows: tuple[int, int]
    """First and last (excluded) there."""

    at: tuple[int, int]
    """First and last (excluded) in Megatron's tensor."""


@dataclass(frozen=True, kw_only=True)
class HfTensor:
    """A tensor of Hugging Face's model."""

    name: str
    """Its name."""

    shape: tuple[int, ...]
    """Its shape."""

    sources: tuple[tuple[GlobalTensor, RowRange], ...]
    """What it is made of, in the order of its rows."""

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


def parts_of(tensor: GlobalTensor, shape: GptShape, names: Names) -> tuple[RowRange, ...]:
    """Return what a tensor of Megatron's model is made of, in the order of its rows.

    Rows that pad the vocabulary are not among them.

    Args:
        tensor: one of `gpt_parameters(shape)`.
        shape: the model.
        names: of the family.
    """
    rows = tensor.shape[0] if tensor.valid_rows is None else tensor.valid_rows
    number, expert, leaf = split_global_name(tensor.name)
    if number is None:
        depth, expert, leaf = split_prediction_name(tensor.name)
        if depth is None:
            return (RowRange(name=_OUTSIDE[tensor.name], rows=(0, rows), at=(0, rows)),)
        number = shape.num_layers + depth  # counted on after the decoder's layers
    layer = f"model.layers.{number}."
    if leaf.startswith("self_attention.linear_qkv."):
        return tuple(_qkv_parts(shape, f"{layer}self_attn.", leaf.rpartition(".")[2]))
    if leaf.endswith(("linear_fc1.weight", "linear_fc1.bias")):
        gate, up = _first_layer(leaf, expert, names)
        half = rows // 2
        return (
            RowRange(name=layer + gate, rows=(0, half), at=(0, half)),
            RowRange(name=layer + up, rows=(0, half), at=(half, rows)),
        )
    return (RowRange(name=layer + _whole(leaf, expert, shape, names), rows=(0, rows), at=(0, rows)),)


def hf_tensors(shape: GptShape, names: Names) -> tuple[HfTensor, ...]:
    """Return all tensors of Hugging Face's model, in the order of the model.

    Those of `prediction_copies` are among them.
    """
    made: dict[str, list[tuple[GlobalTensor, RowRange]]] = {}
    for tensor in gpt_parameters(shape):
        for part in parts_of(tensor, shape, names):
            made.setdefault(part.name, []).append((tensor, part))
    for name, of in prediction_copies(shape).items():
        ((tensor, part),) = made[of]
        made[name] = [(tensor, replace(part, name=name))]
    return tuple(
        HfTensor(
            name=name,
            shape=(max(part.rows[1] for _, part in sources), *sources[0][0].shape[1:]),
            sources=tuple(sorted(sources, key=lambda source: source[1].rows)),
        )
        for name, sources in made.items()
    )


def prediction_copies(shape: GptShape) -> dict[str, str]:
    """Return the tensors that layers of multi-token prediction share with the model, and whose copies they are.

    Megatron has no copies; Hugging Face's layout has both in every such layer.
    """
    head = "model.embed_tokens.weight" if shape.share_embeddings_and_output_weights else "lm_head.weight"
    return {
        f"model.layers.{shape.num_layers + depth}.{copy}.weight": of
        for depth in range(shape.mtp_num_layers)
        for copy, of in (("embed_tokens", "model.embed_tokens.weight"), ("shared_head.head", head))
    }


def _qkv_parts(shape: GptShape, prefix: str, kind: str) -> Iterator[RowRange]:
    for group, heads in enumerate(qkv_rows(shape)):
        for name, (begin, end) in (("q_proj", heads.query), ("k_proj", heads.key), ("v_proj", heads.value)):
            size = end - begin
            rows = (group * size, (group + 1) * size)
            yield RowRange(name=f"{prefix}{name}.{kind}", rows=rows, at=(begin, end))


def _first_layer(leaf: str, expert: int | None, names: Names) -> tuple[str, str]:
    """The names of the two tensors whose rows an MLP's first layer has."""
    kind = leaf.rpartition(".")[2]
    if expert is not None:
        prefix = f"{names.experts}.{expert}."
        return f"{prefix}{names.gate}.{kind}", f"{prefix}{names.up}.{kind}"
    prefix = f"{names.shared}." if leaf.startswith("mlp.shared_experts.") else "mlp."
    return f"{prefix}gate_proj.{kind}", f"{prefix}up_proj.{kind}"


def _whole(leaf: str, expert: int | None, shape: GptShape, names: Names) -> str:
    """The name of the tensor that is the same in both models."""
    if expert is not None:
        return f"{names.experts}.{expert}.{names.down}.{leaf.rpartition('.')[2]}"
    if leaf.startswith("mlp.shared_experts.linear_fc2."):
        return f"{names.shared}.down_proj.{leaf.rpartition('.')[2]}"
    others = {
        "mlp.router.weight": f"{names.router}.weight",
        "mlp.router.expert_bias": f"{names.router}.e_score_correction_bias",
        "mlp.shared_experts.gate_weight": f"{names.shared}_gate.weight",
        **_IN_LAYER,
        **_OF_PREDICTION,
    }
    inside = _LATENT if shape.latent_attention is not None else _NORMS
    others |= {ours: f"self_attn.{theirs}.weight" for ours, theirs in inside.items()}
    return others[leaf]
