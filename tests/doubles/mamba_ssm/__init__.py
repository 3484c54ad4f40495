# SPDX-License-Identifier: Apache-2.0
"""A double of mamba_ssm for machines without a GPU, where its kernels cannot run.

It has what Megatron's Mamba layers import and call in training, with the formulas of Dao and Gu (2024), "Transformers
are SSMs", in torch. Packed sequences and everything for inference are missing.
"""

__version__ = "2.2.6.post3"
