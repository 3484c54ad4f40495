# SPDX-License-Identifier: Apache-2.0
"""What the layers of a model are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron_ext.params.tensors import require_sizes

LayerPart = Literal[
    "state_space", "attention", "sparse_attention", "delta_net", "mlp", "experts", "attention_linear", "mlp_linear"
]
"""A part of a layer, with the norm before it: a layer of a hybrid model is one of these, where a GPT's is attention of
some kind and then an MLP or experts. The last two are one linear layer in place of attention, or of an MLP.
"""


@dataclass(frozen=True, kw_only=True)
class LayerBlock:
    """One layer of a heterogeneous model (``--heterogeneous-layers-config-path``; Nemotron's, found by search)."""

    parts: tuple[LayerPart, ...]
    """What it is made of; attention, the MLP, or both can be left out."""

    num_query_groups: int | None = None
    """Its key/value heads; None for as many as the model says."""

    ffn_hidden_size: int | None = None
    """Inner width of its MLP; None for the one that the model says."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be."""
        require_sizes("heterogeneous layers", self, ("num_query_groups", "ffn_hidden_size"))

    @classmethod
    def of(cls, attention: Any, mlp: Any) -> LayerBlock:
        """Return the block of Megatron's ``AttentionConfig`` and ``MLPConfig`` of a layer."""
        kinds: tuple[tuple[Any, LayerPart, LayerPart], ...] = (
            (attention, "attention", "attention_linear"),
            (mlp, "mlp", "mlp_linear"),
        )
        return cls(
            parts=tuple(linear if said.replace_with_linear else part for said, part, linear in kinds if not said.no_op),
            num_query_groups=attention.num_query_groups,
            ffn_hidden_size=mlp.ffn_hidden_size,
        )
