# SPDX-License-Identifier: Apache-2.0
"""The models of HotSPa's experiments, with the shapes of its artifact: the table in presets.txt."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

import torch

from megatron_ext.params import GptShape

__all__ = ["PRESETS"]


def _read() -> Mapping[str, GptShape]:
    text = resources.files("megatron_ext.hot_switch.cost_model").joinpath("presets.txt").read_text(encoding="utf-8")
    head, *rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {name: _llama(dict(zip(head[1:], map(int, sizes), strict=True))) for name, *sizes in rows}


def _llama(sizes: Mapping[str, int]) -> GptShape:
    # The artifact's models differ from published LLaMAs: vocabulary 30592, norms with a bias.
    return GptShape(
        num_layers=sizes["num-layers"],
        hidden_size=sizes["hidden-size"],
        ffn_hidden_size=sizes["ffn-hidden-size"],
        num_attention_heads=sizes["num-attention-heads"],
        padded_vocab_size=sizes["vocab-size"],
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="LayerNorm",
        dtype=torch.bfloat16,
    )


PRESETS = MappingProxyType(_read())
"""By name; parameters in bf16."""
