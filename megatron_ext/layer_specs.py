# SPDX-License-Identifier: Apache-2.0
"""Layers that Megatron has the parts of and no option for, for its ``--spec megatron_ext.layer_specs NAME``.

Megatron imports this module when a command line names it; it needs no patch.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.nn
from megatron.core import parallel_state
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.training.models.gpt import default_layer_spec

__all__ = ["KeyNorm", "PlainQueryAttention", "QueryNorm", "norms_over_heads", "plain_queries"]


class PlainQueryAttention(MLASelfAttention):  # type: ignore[misc]  # Megatron is Any
    """Latent attention that normalises keys and values, and no queries: as DeepSeek's without ``q_lora_rank``.

    Since 0.19 Megatron has a norm for both or for none.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        # As if queries were projected down, which is what may be normalised or not; they are not, so no norm is built.
        with_rank = copy.copy(self.config)
        with_rank.q_lora_rank = self.config.kv_lora_rank
        both = replace(submodules, q_layernorm=submodules.kv_layernorm)
        found: dict[str, Any] = QKNormConfigResolver(with_rank, both).resolve()
        return {**found, "linear_q_proj": submodules.linear_q_proj, "q_layernorm": IdentityOp}


def plain_queries(config: Any, vp_stage: int | None = None) -> Any:
    """Return the layers that Megatron would take, with `PlainQueryAttention` in them.

    Args:
        config: Megatron's configuration of the model.
        vp_stage: which part of the rank's layers is meant, with virtual stages.

    Raises:
        ValueError: the model has no latent attention, or its queries are projected down.
    """
    if not config.transformer.multi_latent_attention or config.transformer.q_lora_rank is not None:
        raise ValueError("plain_queries is for --multi-latent-attention without --q-lora-rank")
    layers = default_layer_spec(config, vp_stage)
    for attention in _attentions(layers):
        attention.module = PlainQueryAttention
    return layers


class _NormOverHeads(torch.nn.Module):
    """RMSNorm over all channels of all heads, with a weight for each of them.

    Every tensor-parallel rank has the whole weight, and uses its heads' part: Megatron sums the gradients of what is
    called a norm of queries or keys over these ranks, and what a rank has none for is zero there.
    """

    def __init__(self, heads: int, head_size: int, config: Any, eps: float) -> None:
        super().__init__()
        self._group = parallel_state.get_tensor_model_parallel_group()
        if heads % self._group.size():
            raise ValueError(f"norms_over_heads: {heads} heads cannot be cut for TP {self._group.size()}")
        self._eps = eps
        on_cpu = config.use_cpu_initialization or not torch.cuda.is_available()
        device = "cpu" if on_cpu else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(heads * head_size, dtype=config.params_dtype, device=device))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Normalise.

        Args:
            values: this rank's heads, of shape (..., heads, head size).
        """
        exact = values.float()
        squares = exact.square().sum((-2, -1), keepdim=True)
        if self._group.size() > 1:
            # torch leaves that unannotated.
            squares = torch.distributed.nn.all_reduce(squares, group=self._group)  # type: ignore[no-untyped-call]
        normed = exact * torch.rsqrt(squares / self.weight.numel() + self._eps)
        own = self.weight.view(self._group.size(), *values.shape[-2:])[self._group.rank()]
        return own * normed.to(values.dtype)


class QueryNorm(_NormOverHeads):
    """Of the queries."""

    def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
        """Take what Megatron gives a norm of one head: its size, the `TransformerConfig`, and epsilon."""
        super().__init__(config.num_attention_heads, hidden_size, config, eps)


class KeyNorm(_NormOverHeads):
    """Of the keys."""

    def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
        """See `QueryNorm`."""
        super().__init__(config.num_query_groups, hidden_size, config, eps)


def norms_over_heads(config: Any, vp_stage: int | None = None) -> Any:
    """Return the layers that Megatron would take, with norms over all heads at once, as OLMoE has them.

    Args:
        config: Megatron's configuration of the model.
        vp_stage: which part of the rank's layers is meant, with virtual stages.

    Raises:
        ValueError: the model has latent attention, no ``--qk-layernorm``, or another norm than RMSNorm.
    """
    model = config.transformer
    if model.multi_latent_attention or not model.qk_layernorm or model.normalization != "RMSNorm":
        raise ValueError("norms_over_heads is for --qk-layernorm and --normalization RMSNorm without latent attention")
    model.qk_norm_over_heads = True  # by which megatron_ext.params knows the weights
    layers = default_layer_spec(config, vp_stage)
    for attention in _attentions(layers):
        attention.submodules.q_layernorm, attention.submodules.k_layernorm = QueryNorm, KeyNorm
    return layers


def _attentions(layers: Any) -> list[Any]:
    """Return the attention's specification of each layer: Megatron has one for all, or a list in a block."""
    return [layer.submodules.self_attention for layer in getattr(layers, "layer_specs", [layers])]
