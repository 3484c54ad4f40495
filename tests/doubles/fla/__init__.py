# SPDX-License-Identifier: Apache-2.0
"""A double of flash-linear-attention for machines without a GPU, where its kernels cannot run.

It has what Megatron's Gated DeltaNet imports and calls in training, with the formulas of Yang, Kautz and Hatamizadeh
(2024), "Gated Delta Networks", in torch, one position after the other. Packed sequences and states are missing.
"""
