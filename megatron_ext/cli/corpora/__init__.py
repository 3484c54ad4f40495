# SPDX-License-Identifier: Apache-2.0
"""The commands of `megatron-ext data` for corpora that there are already."""
