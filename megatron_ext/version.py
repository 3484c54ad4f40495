# SPDX-License-Identifier: Apache-2.0
"""The version of megatron_ext, in the one place where it is written."""

__version__ = "0.1.0.dev0"
