# SPDX-License-Identifier: Apache-2.0
"""Runs on a double of Transformer Engine, which cannot run without a GPU."""

import dataclasses
from typing import Any

import pytest
from packaging.version import Version

from megatron_ext.patching.gates import installed_version

__all__ = [
    "NEEDS_HYBRID_MODELS",
    "accept_transformer_engine",
    "fuse_the_accumulation_of_gradients",
    "is_of_release",
]

_RELEASE = installed_version("megatron-core")

NEEDS_HYBRID_MODELS = pytest.mark.skipif(
    _RELEASE is None or Version("0.19") > _RELEASE,
    reason="examples/pretrain_gpt.py builds hybrid models from Megatron 0.19 on",
)


def accept_transformer_engine() -> None:
    """Let the CPU backend of a rank accept what the double can do there."""
    import torch
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    from megatron_ext.backends.cpu import cuda_calls
    from megatron_ext.hot_switch.runtime import document_attention as attention
    from megatron_ext.options import table
    from megatron_ext.options.verdict import accepted

    ours = {
        "--transformer-impl transformer_engine",
        "--moe-grouped-gemm",
        "--defer-embedding-wgrad-compute",
        "--hybrid-layer-pattern",
        "--experimental-attention-variant",
        "--dsa-indexer-topk",
        "--moe-latent-size",
        "--sft without hot switching",
        "--qk-clip",
        "--log-max-attention-logit",
        "--dataloader-inter-document-masking",
        *(f"--save-{what}-interval" for what in ("activations", "dgrads", "tokens-per-expert")),
    }
    here = accepted("the double does it")
    table.ROWS = tuple(
        dataclasses.replace(row, verdicts={**row.verdicts, "cpu": here}) if row.option in ours else row
        for row in table.ROWS
    )
    # Its kernels for documents of several lengths take 16 bits only.
    attention._FUSED_DTYPES.add(torch.float32)
    # Grouped experts ask whether the device is new enough.
    asked = "torch.cuda:get_device_capability"
    cuda_calls._PATCHES = tuple(patch for patch in cuda_calls._PATCHES if patch.target != asked)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    # Megatron makes a CUDA stream for attention over parts of rows, unless there is one.
    TEDotProductAttention.cp_stream = object()


def is_of_release(release: str = "2.9.0") -> None:
    """Let Megatron take the double for a later release, of which it has what attention returns besides."""
    from megatron.core import utils

    utils._te_version = Version(release)


def fuse_the_accumulation_of_gradients() -> None:
    """Let products add the gradients of weights where they gather, as is Megatron's default on a GPU with Apex."""
    from transformer_engine.pytorch.base import WithWeights

    from megatron_ext.backends.cpu import options

    options.ARGUMENT_DEFAULTS["gradient_accumulation_fusion"] = True
    times = WithWeights.times

    def fused(self: Any, x: Any, weight: Any) -> Any:
        assert self.fuse_wgrad_accumulation
        return times(self, x, weight)

    WithWeights.times = fused
