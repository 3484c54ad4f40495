# SPDX-License-Identifier: Apache-2.0
"""SPES (arXiv 2602.11543): peers that each train a part of a mixture's experts.

Algorithms, without Megatron; `spes.feature` makes a Megatron job such a peer.
"""

from megatron_ext.spes.config import SpesConfig
from megatron_ext.spes.config_file import read_spes_config
from megatron_ext.spes.experts import ExpertLayer, expert_layer_of, expert_layers, expert_of
from megatron_ext.spes.load_balance import count_weights, decayed_factor, load_balancing_loss
from megatron_ext.spes.merge_config import MergeConfig
from megatron_ext.spes.merging import merge_experts, merge_layer
from megatron_ext.spes.ownership import Ownership
from megatron_ext.spes.spared_memory import TrainingBytes, training_bytes

__all__ = [
    "ExpertLayer",
    "MergeConfig",
    "Ownership",
    "SpesConfig",
    "TrainingBytes",
    "count_weights",
    "decayed_factor",
    "expert_layer_of",
    "expert_layers",
    "expert_of",
    "load_balancing_loss",
    "merge_experts",
    "merge_layer",
    "read_spes_config",
    "training_bytes",
]
