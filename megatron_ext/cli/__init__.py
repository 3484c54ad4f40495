# SPDX-License-Identifier: Apache-2.0
"""The `megatron-ext` command."""
