# SPDX-License-Identifier: Apache-2.0
"""See the package."""

from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.linear import GroupedLinear, LayerNormLinear, Linear
from transformer_engine.pytorch.norms import LayerNorm, RMSNorm

__all__ = ["DotProductAttention", "GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear", "RMSNorm", "distributed"]
