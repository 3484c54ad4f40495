# SPDX-License-Identifier: Apache-2.0
"""Device backends other than Megatron's own CUDA + NCCL."""
