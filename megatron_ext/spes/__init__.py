# SPDX-License-Identifier: Apache-2.0
"""SPES (arXiv 2602.11543): peers that each train a part of a mixture's experts. Algorithms only, without Megatron."""

from megatron_ext.spes.config import SpesConfig
from megatron_ext.spes.config_file import read_spes_config
from megatron_ext.spes.experts import ExpertLayer, expert_layers, expert_of
from megatron_ext.spes.ownership import Ownership

__all__ = ["ExpertLayer", "Ownership", "SpesConfig", "expert_layers", "expert_of", "read_spes_config"]
