# SPDX-License-Identifier: Apache-2.0
"""SPES (arXiv 2602.11543): peers that each train a part of a mixture's experts. Algorithms only, without Megatron."""

from megatron_ext.spes.config import SpesConfig
from megatron_ext.spes.config_file import read_spes_config
from megatron_ext.spes.experts import ExpertLayer, expert_layers, expert_of
from megatron_ext.spes.merge_config import MergeConfig
from megatron_ext.spes.merging import merge_experts, merge_layer
from megatron_ext.spes.ownership import Ownership

__all__ = [
    "ExpertLayer",
    "MergeConfig",
    "Ownership",
    "SpesConfig",
    "expert_layers",
    "expert_of",
    "merge_experts",
    "merge_layer",
    "read_spes_config",
]
