# SPDX-License-Identifier: Apache-2.0
"""The models of HotSPa's experiments, with the shapes of its artifact."""

from __future__ import annotations

from types import MappingProxyType

import torch

from megatron_ext.params import GptShape

__all__ = ["PRESETS"]


def _llama(num_layers: int, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int) -> GptShape:
    # The artifact's models differ from published LLaMAs: vocabulary 30592, norms with a bias.
    return GptShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_attention_heads=num_attention_heads,
        padded_vocab_size=30592,
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="LayerNorm",
        dtype=torch.bfloat16,
    )


PRESETS = MappingProxyType(
    {
        "llama-3b": _llama(16, 2048, 5120, 32),
        "llama-7b": _llama(32, 4096, 11008, 32),
        "llama-13b": _llama(40, 5120, 13824, 40),
        "llama-32b": _llama(60, 6656, 17920, 64),
    }
)
"""By name; parameters in bf16."""
