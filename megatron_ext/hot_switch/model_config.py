# SPDX-License-Identifier: Apache-2.0
"""What a script asks for by the config of the model that it builds, and hot switching refuses like an option."""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from megatron_ext.options import FEATURES, ROWS, refused_rows
from megatron_ext.options.asked import attention_variant
from megatron_ext.run_options import all_options

__all__ = ["attention_of", "circumstance_of", "refused_config"]

_FEATURE = "hot-switch"


def attention_of(args: Any) -> str:
    """Return how documents are kept apart, one of `ATTENTIONS`: as was asked for, or as the layers need it."""
    asked: str | None = args.hot_switch_attention
    return asked or ("padded" if attention_variant(args) == "gated_delta_net" else "documents")


def circumstance_of(args: Any) -> str:
    """Return what of hot switching's own options decides whether some of Megatron's go with it."""
    return f"--hot-switch-attention {attention_of(args)}"


def refused_config(args: Any, config: Any) -> list[str]:
    """Return one sentence for each option that a script asks for by the model's config alone, with its fix.

    Args:
        args: Megatron's arguments, which do not ask for it.
        config: the `GPTModelConfig` of home, as the script has left it.
    """
    paths = [path for row in ROWS for path in row.in_config]
    in_config = {path.rpartition(".")[2]: attrgetter(path)(config) for path in paths}
    merged = SimpleNamespace(**{**all_options(args), **in_config})
    merged.num_experts = config.transformer.num_moe_experts
    found = []
    if not config.transformer.calculate_per_token_loss:
        found.append(
            "the model's config says calculate_per_token_loss=False; leave it as --calculate-per-token-loss sets it, "
            "so that the gradients of strategies can be added"
        )
    for circumstance in ("", circumstance_of(args)):
        asked = {row.option for row, _ in refused_rows(args, _FEATURE, circumstance)}
        found += [
            verdict.sentence(row.option, FEATURES[_FEATURE], ", as the model's config says,")
            for row, verdict in refused_rows(merged, _FEATURE, circumstance)
            if row.option not in asked
        ]
    return list(dict.fromkeys(found))  # options may share a sentence
