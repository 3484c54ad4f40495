# SPDX-License-Identifier: Apache-2.0
"""Extend stock Megatron-LM: local SGD, decentralized MoE pre-training, parallelism hot switching.

    from megatron_ext import patch_megatron

    patch_megatron()

before Megatron's arguments are parsed, or no change at all: `python -m megatron_ext pretrain_gpt.py ...`.
"""

from megatron_ext.activation import patch_megatron, unpatch_megatron
from megatron_ext.version import __version__

__all__ = ["__version__", "patch_megatron", "unpatch_megatron"]
