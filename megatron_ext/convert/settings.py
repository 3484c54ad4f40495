# SPDX-License-Identifier: Apache-2.0
"""What a GPT computes, in Megatron's words: everything that a conversion has to carry, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from megatron_ext.params import GptShape, LatentAttention

__all__ = ["NORMS_OVER_HEADS", "PLAIN_QUERIES", "ModelSettings"]

NORMS_OVER_HEADS = ("megatron_ext.layer_specs", "norms_over_heads")
"""What --spec has for queries and keys whose heads are normalised all at once."""

PLAIN_QUERIES = ("megatron_ext.layer_specs", "plain_queries")
"""What --spec has for latent attention that normalises keys and values, and no queries."""

_MLA = ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A GPT with rotary positions and RMSNorm, as Megatron's arguments describe it.

    Fields have the names of Megatron's arguments (its parser's destinations), except where the docstring says so.
    Those that do not say what the model computes for the next token take no part in a comparison.
    """

    num_layers: int
    """Decoder layers."""

    hidden_size: int
    """Width of the residual stream."""

    ffn_hidden_size: int
    """Inner width of a dense layer's MLP."""

    num_attention_heads: int
    """Query heads."""

    num_query_groups: int
    """Key/value heads; the number of query heads where there is one for each. Megatron knows it with
    ``--group-query-attention`` alone."""

    kv_channels: int
    """Size of one head."""

    vocab_size: int
    """Rows of the vocabulary without Megatron's padding."""

    max_position_embeddings: int
    """Longest sequence that the model was made for."""

    layernorm_epsilon: float
    """Epsilon of all norms."""

    untie_embeddings_and_output_weights: bool
    """Whether the output layer has weights of its own."""

    rotary_base: int = 10000
    """Base of the rotary frequencies."""

    rotary_percent: float = 1.0
    """Part of a head's channels that is rotated."""

    use_rope_scaling: bool = False
    """Whether the frequencies are scaled as in Llama 3.1."""

    rope_scaling_factor: float = 8.0
    """By how much; counts with ``use_rope_scaling`` alone."""

    add_bias_linear: bool = False
    """Whether every linear layer has a bias."""

    add_qkv_bias: bool = False
    """Whether the projections of queries, keys and values have one even so."""

    qk_layernorm: bool = False
    """Whether queries and keys, or with latent attention what they are projected up from, are normalised."""

    qk_norm_over_heads: bool = False
    """Whether all heads are normalised at once; in Megatron's arguments that is a ``--spec``."""

    num_experts: int | None = None
    """Routed experts per layer; None for a dense model."""

    moe_ffn_hidden_size: int | None = None
    """Inner width of a routed expert."""

    moe_layer_freq: int | tuple[int, ...] = 1
    """1 where every layer has experts, or 0 and 1 for each layer."""

    moe_router_topk: int = 2
    """Experts per token."""

    moe_router_pre_softmax: bool = False
    """Whether the softmax is over all experts' scores; otherwise over those chosen."""

    moe_router_score_function: str = "softmax"
    """``softmax`` or ``sigmoid``."""

    moe_router_enable_expert_bias: bool = False
    """Whether a bias takes part in choosing experts."""

    moe_router_topk_scaling_factor: float = 1.0
    """What the chosen experts' scores are multiplied by; Megatron's None is 1."""

    moe_router_num_groups: int | None = None
    """Groups of experts of which some are chosen first."""

    moe_router_group_topk: int | None = None
    """How many of them."""

    moe_shared_expert_intermediate_size: int | None = None
    """Inner width of the shared expert; None without one."""

    moe_shared_expert_gate: bool = False
    """Whether its output is gated."""

    kv_lora_rank: int | None = None
    """Channels that keys and values share before they are projected up; None without multi-latent attention."""

    q_lora_rank: int | None = None
    """The same of queries; None where they are projected at once."""

    qk_head_dim: int | None = None
    """Size of a query's part without position, with multi-latent attention."""

    qk_pos_emb_head_dim: int | None = None
    """Size of its rotated part."""

    v_head_dim: int | None = None
    """Size of a head's value."""

    rope_type: str = "rope"
    """``rope``, or, with multi-latent attention, ``yarn``: with 32 and 1 turns as bounds over 4096 positions."""

    rotary_scaling_factor: float = 1.0
    """By how much yarn stretches the positions."""

    mscale: float = 1.0
    """Yarn's temperature of the rotated parts."""

    mscale_all_dim: float = 0.0
    """Its temperature of the scores."""

    mtp_num_layers: int | None = field(default=None, compare=False)
    """Layers of multi-token prediction; they say nothing about the next token, and only some families have them."""

    moe_aux_loss_coeff: float = field(default=0.0, compare=False)
    """Weight of the loss that balances experts; only training looks at it."""

    moe_router_load_balancing_type: str = field(default="aux_loss", compare=False)
    """Over which tokens that loss is: ``aux_loss`` or, sequence by sequence, ``seq_aux_loss``."""

    attention_dropout: float = field(default=0.0, compare=False)
    """Part of the attention's weights that training leaves out."""

    hidden_dropout: float = field(default=0.0, compare=False)
    """Part of what layers add to the residual stream that training leaves out; 0 in all of Hugging Face's families
    here, which have no field for it."""

    @property
    def multi_latent_attention(self) -> bool:
        """Whether attention is multi-latent."""
        return self.kv_lora_rank is not None

    @property
    def layer_spec(self) -> tuple[str, str] | None:
        """What ``--spec`` has where Megatron has no option for the model's layers; None where it has one."""
        if self.qk_norm_over_heads:
            return NORMS_OVER_HEADS
        if self.multi_latent_attention and self.qk_layernorm and self.q_lora_rank is None:
            return PLAIN_QUERIES
        return None

    @property
    def is_homogeneous(self) -> bool:
        """Whether all layers have the same tensors, which Megatron's checkpoints then stack."""
        return self.moe_layer_freq == 1

    def padded_vocab_size(self, divisor: int) -> int:
        """Return the rows of the embedding in a checkpoint whose rows are a multiple of ``divisor``."""
        return -(-self.vocab_size // divisor) * divisor

    def shape(self, dtype: torch.dtype = torch.float32, divisor: int = 1) -> GptShape:
        """Return the tensors' description.

        Args:
            dtype: of the parameters.
            divisor: the embedding's rows are padded to a multiple of it.
        """
        latent = None
        if self.multi_latent_attention:
            latent = LatentAttention(**{name: getattr(self, name) for name in _MLA})
        layers = self.moe_layer_freq
        return GptShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            kv_channels=self.kv_channels,
            padded_vocab_size=self.padded_vocab_size(divisor),
            vocab_size=self.vocab_size,
            share_embeddings_and_output_weights=not self.untie_embeddings_and_output_weights,
            gated_linear_unit=True,
            add_bias_linear=self.add_bias_linear,
            add_qkv_bias=self.add_qkv_bias,
            qk_layernorm=self.qk_layernorm,
            qk_norm_over_heads=self.qk_norm_over_heads,
            latent_attention=latent,
            normalization="RMSNorm",
            num_moe_experts=self.num_experts,
            moe_ffn_hidden_size=self.moe_ffn_hidden_size,
            moe_layers=() if isinstance(layers, int) else tuple(bool(layer) for layer in layers),
            moe_shared_expert_intermediate_size=self.moe_shared_expert_intermediate_size,
            moe_shared_expert_gate=self.moe_shared_expert_gate,
            moe_router_enable_expert_bias=self.moe_router_enable_expert_bias,
            mtp_num_layers=self.mtp_num_layers or 0,
            dtype=dtype,
        )

    def differences(self, other: ModelSettings) -> dict[str, tuple[Any, Any]]:
        """Return the fields in which two models differ, each with both values."""
        found = {
            entry.name: (getattr(self, entry.name), getattr(other, entry.name))
            for entry in fields(self)
            if entry.compare and getattr(self, entry.name) != getattr(other, entry.name)
        }
        if self.num_experts is not None and self.moe_layer_freq == 1 == other.moe_layer_freq:
            found.pop("ffn_hidden_size", None)  # of layers that there are not
        return found

    def arguments(self) -> Mapping[str, Any]:
        """Return the values of Megatron's arguments, by their names in its namespace."""
        layers = self.moe_layer_freq
        return {
            **{entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "qk_norm_over_heads"},
            "spec": list(self.layer_spec) if self.layer_spec is not None else None,
            "group_query_attention": self._groups_queries,
            "num_query_groups": self.num_query_groups if self._groups_queries else 1,
            "moe_layer_freq": layers if isinstance(layers, int) else list(layers),
            "multi_latent_attention": self.multi_latent_attention,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "swiglu": True,
            # 0.18 and earlier ask for both.
            "add_position_embedding": True,
            "use_rotary_position_embeddings": False,
        }

    @property
    def _groups_queries(self) -> bool:
        return not self.multi_latent_attention and self.num_query_groups != self.num_attention_heads
