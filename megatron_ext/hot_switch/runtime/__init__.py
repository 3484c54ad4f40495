# SPDX-License-Identifier: Apache-2.0
"""Inside Megatron's training step: home, its guests, their losses, and attention within documents."""
