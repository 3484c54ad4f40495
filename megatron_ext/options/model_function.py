# SPDX-License-Identifier: Apache-2.0
"""Rows on what a model computes, whatever computes it."""

from __future__ import annotations

from megatron_ext.options.common_verdicts import AS_ANY_JOB, NO_TE_ON_CPU, OPEN
from megatron_ext.options.row import differs, given, is_set, row
from megatron_ext.options.verdict import needs_gpu, refused

__all__ = ["MODEL_FUNCTION"]

_POSITIONS = ("none", "rope", "learned_absolute")

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
    row(
        "--softmax-type",
        differs("softmax_type", "vanilla"),
        cpu=OPEN,
        local_sgd=OPEN,
        sync_service=AS_ANY_JOB,
        hot_switch=OPEN.but(
            "--hot-switch-attention documents",
            refused(
                "attention by document has the ordinary softmax only",
                "use --transformer-impl local with --hot-switch-attention rows",
            ),
        ),
        in_config=("transformer.softmax_type",),
    ),
    row(
        "--window-size",
        given("window_size"),
        cpu=OPEN,
        local_sgd=OPEN,
        sync_service=AS_ANY_JOB,
        hot_switch=refused("Megatron's unfused attention forgets the documents' mask with it"),
        in_config=("transformer.window_size",),
    ),
    row(
        "--position-embedding-type",
        differs("position_embedding_type", *_POSITIONS),
        cpu=OPEN,
        local_sgd=OPEN,
        sync_service=AS_ANY_JOB,
        hot_switch=refused("it has not been tested with packed rows", f"use one of {', '.join(_POSITIONS)}"),
        in_config=("position_embedding_type",),
    ),
    row(
        "--mla-down-proj-fusion",
        cpu=OPEN,
        local_sgd=OPEN,
        sync_service=AS_ANY_JOB,
        hot_switch=refused("the parameter view does not know it"),
    ),
    row(
        "--spec",
        given("spec"),
        cpu=OPEN,
        local_sgd=OPEN,
        sync_service=AS_ANY_JOB,
        hot_switch=refused("the parameter view knows Megatron's own GPT layers only"),
    ),
)
