# SPDX-License-Identifier: Apache-2.0
"""A Megatron job as a peer: feature, options, checkpoints, and what each rank holds."""
