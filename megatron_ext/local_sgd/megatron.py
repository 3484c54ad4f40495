# SPDX-License-Identifier: Apache-2.0
"""Under atorch's name: the two functions that give Megatron local SGD."""

from megatron_ext.local_sgd.atorch_names import local_sgd_args_provider, patch_megatron_for_local_sgd

__all__ = ["local_sgd_args_provider", "patch_megatron_for_local_sgd"]
