# SPDX-License-Identifier: Apache-2.0
"""A double of Transformer Engine for machines without a GPU, where the real one cannot run.

It has what Megatron's Transformer Engine layers subclass and call in fp32 and bf16: names of parameters and their
attributes, arguments, shapes, communication over tensor-parallel ranks, and what attention refuses. The arithmetic is
torch's. Kernels, FP8, fused optimizers and everything else are missing. Facts are those of release 2.6.
"""

from transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
__version__ = "2.6.0"
