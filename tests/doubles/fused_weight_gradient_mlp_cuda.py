# SPDX-License-Identifier: Apache-2.0
"""A double of Apex's extension by which Megatron's own linear layers add gradients of weights where they gather."""

__all__ = ["wgrad_gemm_accum_fp16", "wgrad_gemm_accum_fp32"]


def wgrad_gemm_accum_fp32(inputs, gradients, main_grad):
    """Add the gradient of a weight to fp32 numbers; inputs and gradients are (tokens, channels)."""
    main_grad.add_((gradients.T @ inputs).float())


def wgrad_gemm_accum_fp16(inputs, gradients, main_grad):
    """The same, to numbers like its inputs."""
    main_grad.add_(gradients.T @ inputs)
