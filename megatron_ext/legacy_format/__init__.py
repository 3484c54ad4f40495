# SPDX-License-Identifier: Apache-2.0
"""Megatron's legacy checkpoint format (`--ckpt-format torch`): a state dict per tensor, pipeline and expert rank."""
