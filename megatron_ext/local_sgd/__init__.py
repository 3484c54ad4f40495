# SPDX-License-Identifier: Apache-2.0
"""Local SGD: workers that train apart and meet through an outer optimizer."""

from megatron_ext.local_sgd.atorch_names import local_sgd_args_provider, patch_megatron_for_local_sgd
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.reducer_config import GTAConfig

__all__ = [
    "GTAConfig",
    "LocalSGDConfig",
    "OuterOptimizerConfig",
    "StreamingConfig",
    "local_sgd_args_provider",
    "patch_megatron_for_local_sgd",
]
