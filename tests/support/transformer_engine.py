# SPDX-License-Identifier: Apache-2.0
"""Runs on a double of Transformer Engine, which cannot be imported without a GPU."""

__all__ = ["accept_transformer_engine"]


def accept_transformer_engine() -> None:
    """Let the CPU backend of a rank accept what the double can do there."""
    import torch
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    from megatron_ext.backends.cpu import cuda_calls, options
    from megatron_ext.hot_switch import attention

    ours = {"--transformer-impl transformer_engine", "--moe-grouped-gemm"}
    options.RULES = tuple(rule for rule in options.RULES if rule.option not in ours)
    # Its kernels for documents of several lengths take 16 bits only.
    attention._FUSED_DTYPES.add(torch.float32)
    # Grouped experts ask whether the device is new enough.
    asked = "torch.cuda:get_device_capability"
    cuda_calls._PATCHES = tuple(patch for patch in cuda_calls._PATCHES if patch.target != asked)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    # Megatron makes a CUDA stream for attention over parts of rows, unless there is one.
    TEDotProductAttention.cp_stream = object()
