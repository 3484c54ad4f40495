# SPDX-License-Identifier: Apache-2.0
"""Rows on what a model computes, whatever computes it."""

from __future__ import annotations

from megatron_ext.options.common_verdicts import AS_ANY_JOB, NO_TE_ON_CPU, OPEN
from megatron_ext.options.row import given, is_set, row
from megatron_ext.options.verdict import needs_gpu

__all__ = ["MODEL_FUNCTION"]

MODEL_FUNCTION = (
    row(
        "--experimental-attention-variant",
        given("experimental_attention_variant"),
        cpu=NO_TE_ON_CPU,
        local_sgd=OPEN,
        hot_switch=OPEN,
        sync_service=AS_ANY_JOB,
    ),
    row(
        "--apply-layernorm-1p",
        is_set("layernorm_zero_centered_gamma"),
        cpu=needs_gpu("torch's LayerNorm has no zero-centred weight"),
        local_sgd=OPEN,
        hot_switch=OPEN,
        sync_service=AS_ANY_JOB,
    ),
)
