# SPDX-License-Identifier: Apache-2.0
"""The kinds of `megatron-ext simulate`, and what they have in common."""
