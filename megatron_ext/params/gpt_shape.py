# SPDX-License-Identifier: Apache-2.0
"""The sizes and options of a GPT, or of a hybrid model, that decide which tensors it has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from megatron_ext.params.attention_variants import DeltaNet, SparseIndexer
from megatron_ext.params.layer_parts import LayerBlock, LayerPart
from megatron_ext.params.state_space import StateSpace
from megatron_ext.params.tensors import ParamsError, require_sizes


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-latent attention (MLA), which projects queries, keys and values down before it makes heads.

    Names are those of Megatron's ``MLATransformerConfig`` wherever it has one.
    """

    kv_lora_rank: int
    """Channels that keys and values have in common before they are projected up."""

    q_lora_rank: int | None = None
    """The same of queries; None for queries that are projected at once."""

    qk_head_dim: int
    """Size of a query's or key's part without position."""

    qk_pos_emb_head_dim: int
    """Size of its rotary part, which all heads' keys share."""

    v_head_dim: int
    """Size of a head's value."""

    cut_down_projections: bool = True
    """Whether tensor parallelism cuts the down projections, as in Megatron's local implementation; with Transformer
    Engine every rank has all of them."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be."""
        sizes = ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        require_sizes("multi-latent attention", self, sizes)


@dataclass(frozen=True, kw_only=True)
class GptShape:
    """Everything about a dense, mixture-of-experts or hybrid GPT that its parameters' shapes depend on.

    Names are those of Megatron's ``TransformerConfig`` wherever it has one.
    """

    num_layers: int
    """Decoder layers."""

    hidden_size: int
    """Width of the residual stream."""

    ffn_hidden_size: int
    """Inner width of the dense MLP (before gate and up are fused)."""

    num_attention_heads: int
    """Query heads."""

    padded_vocab_size: int
    """Rows of the word embedding, padding included."""

    num_query_groups: int | None = None
    """Key/value heads; None for one per query head."""

    kv_channels: int | None = None
    """Size of one head; None for ``hidden_size / num_attention_heads``."""

    vocab_size: int | None = None
    """Rows of the vocabulary without padding; None when every row is a token."""

    max_sequence_length: int = 0
    """Rows of the learned position embedding; 0 for models without one (rope, none)."""

    share_embeddings_and_output_weights: bool = False
    """Whether the output layer is the word embedding."""

    gated_linear_unit: bool = False
    """Whether fc1 is the fused gate and up projection (SwiGLU and its kin)."""

    add_bias_linear: bool = True
    """Whether linear layers have a bias."""

    add_qkv_bias: bool = False
    """Whether the fused QKV projection has a bias even without ``add_bias_linear``."""

    attention_output_gate: bool = False
    """Whether the QKV projection also makes a gate of the query's size."""

    learnable_softmax: bool = False
    """Whether attention has one learnable softmax offset per head (``softmax_type`` learnable)."""

    qk_layernorm: bool = False
    """Whether queries and keys, or what they are projected up from, are normalised by a norm with weights."""

    qk_norm_over_heads: bool = False
    """Whether that norm is over all heads at once, with a weight for each channel of each head (OLMoE)."""

    latent_attention: LatentAttention | None = None
    """Multi-latent attention in place of the fused QKV projection; None without it."""

    delta_net: DeltaNet | None = None
    """Gated DeltaNet in some layers; None without it."""

    sparse_indexer: SparseIndexer | None = None
    """What sparse attention over latent attention chooses keys with; None without it. Of a GPT all layers have it."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of norm; only LayerNorm has a bias."""

    num_moe_experts: int | None = None
    """Routed experts per layer; None for a dense model."""

    mtp_num_layers: int = 0
    """Layers of multi-token prediction with weights of their own; 0 for none."""

    moe_ffn_hidden_size: int | None = None
    """Inner width of one routed expert; None for ``ffn_hidden_size``."""

    moe_latent_size: int | None = None
    """Channels that tokens are projected down to before routed experts, and up from after them; None for all."""

    moe_layers: tuple[bool, ...] = ()
    """Which layers have experts; empty for all of them (with experts) or none (without)."""

    layer_kinds: tuple[LayerPart, ...] = ()
    """What each layer of a hybrid model is; empty for a GPT."""

    mtp_layer_kinds: tuple[LayerPart, ...] = ()
    """The same of what one layer of multi-token prediction is made of."""

    layer_blocks: tuple[LayerBlock, ...] = ()
    """What each layer of a heterogeneous model is; empty where all layers have the sizes above."""

    state_space: StateSpace | None = None
    """Sizes of the state-space layers; None without any."""

    moe_shared_expert_intermediate_size: int | None = None
    """Inner width of the shared expert; None for none."""

    moe_shared_expert_gate: bool = False
    """Whether the shared expert's output is gated."""

    moe_router_enable_expert_bias: bool = False
    """Whether the router keeps an expert bias (a buffer) for balancing without auxiliary loss."""

    moe_router_quantile_balancing: bool = False
    """Whether the router keeps quantile balancing's bias (a buffer)."""

    dtype: torch.dtype = torch.float32
    """Type of the model's parameters."""

    def __post_init__(self) -> None:
        """Refuse sizes that contradict each other."""
        sizes = (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "padded_vocab_size",
            "num_query_groups",
            "kv_channels",
            "num_moe_experts",
            "moe_ffn_hidden_size",
            "moe_latent_size",
            "moe_shared_expert_intermediate_size",
        )
        require_sizes("GPT shape", self, sizes)
        if self.head_size < 1:
            raise ParamsError(
                f"GPT shape: hidden_size {self.hidden_size} is less than num_attention_heads "
                f"{self.num_attention_heads}, so that heads have no channels; change one of them, or give kv_channels"
            )
        if self.max_sequence_length < 0:
            raise ParamsError(f"GPT shape: max_sequence_length must be 0 or more, got {self.max_sequence_length}")
        if self.num_attention_heads % self.query_groups:
            raise ParamsError(
                f"GPT shape: num_attention_heads {self.num_attention_heads} cannot be divided over num_query_groups "
                f"{self.query_groups}; change one of them"
            )
        if self.vocab_size is not None and not 0 < self.vocab_size <= self.padded_vocab_size:
            raise ParamsError(
                f"GPT shape: vocab_size must be 1..{self.padded_vocab_size} (the padded size), "
                f"got {self.vocab_size}"
            )
        if self.moe_layers and len(self.moe_layers) != self.num_layers:
            raise ParamsError(
                f"GPT shape: moe_layers must have one entry per layer ({self.num_layers}), "
                f"got {len(self.moe_layers)}"
            )
        if self.delta_net is not None and not self.layer_kinds and len(self.delta_net.layers) != self.num_layers:
            raise ParamsError(
                f"GPT shape: delta_net.layers must have one entry per layer ({self.num_layers}), "
                f"got {len(self.delta_net.layers)}"
            )
        if self.sparse_indexer is not None and self.latent_attention is None:
            raise ParamsError("GPT shape: sparse_indexer is for latent attention, but latent_attention is not set")
        if self.layer_kinds and len(self.layer_kinds) != self.num_layers:
            raise ParamsError(
                f"GPT shape: layer_kinds must have one entry per layer ({self.num_layers}), got {len(self.layer_kinds)}"
            )
        if self.layer_blocks and len(self.layer_blocks) != self.num_layers:
            raise ParamsError(
                f"GPT shape: layer_blocks must have one entry per layer ({self.num_layers}), "
                f"got {len(self.layer_blocks)}"
            )
        for layer in range(len(self.layer_blocks)):
            self.of_layer(layer)
        if self.layer_kinds and self.mtp_num_layers and not self.mtp_layer_kinds:
            raise ParamsError("GPT shape: mtp_num_layers asks for layers, but mtp_layer_kinds does not say of what")
        for kind, field, given in (
            ("state_space", "state_space", self.state_space),
            ("delta_net", "delta_net", self.delta_net),
            ("sparse_attention", "sparse_indexer", self.sparse_indexer),
        ):
            if kind in self.layer_kinds + self.mtp_layer_kinds and given is None:
                raise ParamsError(f"GPT shape: layer_kinds asks for {kind} layers, but {field} is not set")
        if any(self.moe_layers) and not self.num_moe_experts:
            raise ParamsError("GPT shape: moe_layers asks for experts, but num_moe_experts is not set")

    @property
    def query_groups(self) -> int:
        """Key/value heads."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        if self.kv_channels is None:
            return self.hidden_size // self.num_attention_heads
        return self.kv_channels

    @property
    def score_size(self) -> int:
        """Channels of one head's query and of its value, together."""
        latent = self.latent_attention
        if latent is None:
            return 2 * self.head_size
        return latent.qk_head_dim + latent.qk_pos_emb_head_dim + latent.v_head_dim

    @property
    def expert_ffn_size(self) -> int:
        """Inner width of one routed expert."""
        return self.ffn_hidden_size if self.moe_ffn_hidden_size is None else self.moe_ffn_hidden_size

    @property
    def expert_width(self) -> int:
        """Channels that routed experts read and write."""
        return self.hidden_size if self.moe_latent_size is None else self.moe_latent_size

    def parts_of(self, layer: int) -> tuple[LayerPart, ...]:
        """Return what decoder layer ``layer`` (from 0) is made of: two parts in a GPT, one in a hybrid model."""
        if self.layer_blocks:
            return self.layer_blocks[layer].parts
        if self.layer_kinds:
            return (self.layer_kinds[layer],)
        attention: LayerPart = "attention" if self.sparse_indexer is None else "sparse_attention"
        if self.delta_net is not None and self.delta_net.layers[layer]:
            attention = "delta_net"
        return (attention, "experts" if self.is_moe_layer(layer) else "mlp")

    def of_layer(self, layer: int) -> GptShape:
        """Return the model's shape with the sizes that decoder layer ``layer`` (from 0) has.

        Raises:
            ParamsError: they do not go together.
        """
        if not self.layer_blocks:
            return self
        block = self.layer_blocks[layer]
        return replace(
            self,
            num_query_groups=block.num_query_groups or self.num_query_groups,
            ffn_hidden_size=block.ffn_hidden_size or self.ffn_hidden_size,
            layer_blocks=(),
        )

    @property
    def prediction_parts(self) -> tuple[LayerPart, ...]:
        """What a layer of multi-token prediction is made of: in a GPT it is of the last decoder layer's kind, in a
        heterogeneous model attention and an MLP of the model's own sizes.
        """
        if self.layer_blocks:
            return ("attention", "mlp")
        return self.mtp_layer_kinds if self.layer_kinds else self.parts_of(self.num_layers - 1)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` (counted from 0) has routed experts."""
        return self.moe_layers[layer] if self.moe_layers else bool(self.num_moe_experts)
