# SPDX-License-Identifier: Apache-2.0
"""Whether a command line asks for a feature, for those who have to know of another one than their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = [
    "asks_to_switch",
    "attention_variant",
    "builds_from_config",
    "has_linear_layers",
    "heterogeneous_layers",
    "layers_file_problem",
    "packs_documents",
]

_LAYERS_FILE_FIELDS = (
    "block_configs",
    "hidden_act",
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
)
"""That Megatron reads of the file of heterogeneous layers."""


def asks_to_switch(args: Any) -> bool:
    """Return whether there are several strategies to switch between (hot switching).

    Args:
        args: Megatron's arguments, which lack those of features that this process has not loaded.
    """
    given = (getattr(args, name, None) for name in ("hot_switch_strategies", "hot_switch_strategy_file"))
    return any(value is not None for value in given)


def attention_variant(args: Any) -> str | None:
    """Return the variant of attention that a GPT's layers have, by one name in all releases; None for softmax.

    Args:
        args: Megatron's arguments, or a model's `TransformerConfig`.
    """
    variant: str | None = args.experimental_attention_variant
    # Upstream's main has a shorter name for one.
    return "gated_delta_net" if variant == "gdn" else variant


def heterogeneous_layers(args: Any) -> list[Any]:
    """Return the description of each layer of a heterogeneous model, as Megatron reads it.

    Args:
        args: Megatron's arguments.

    Returns:
        None of any other model, nor where Megatron cannot read them, which it says itself.
    """
    if args.heterogeneous_layers_config_path is None:
        return []
    # A checkpoint's arguments have the content, which goes before the file.
    content = args.heterogeneous_layers_config_encoded_json
    try:
        if content is None:
            content = Path(args.heterogeneous_layers_config_path).read_text(encoding="utf-8")
        return list(json.loads(content)["block_configs"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def layers_file_problem(args: Any) -> str | None:
    """Return why Megatron cannot read the file of heterogeneous layers, which it says without the file's name.

    Args:
        args: Megatron's arguments as parsed.
    """
    content, path = args.heterogeneous_layers_config_encoded_json, args.heterogeneous_layers_config_path
    if path is None or content is not None:
        return None
    title = f"--heterogeneous-layers-config-path {path}"
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        return f"{title}: {error.strerror}; give the config.json of such a model"
    except ValueError as error:
        return f"{title}: is not JSON ({error}); give the config.json of such a model"
    if not isinstance(found, dict):
        return f"{title}: is not a JSON object; give the config.json of such a model"
    lacking = [name for name in _LAYERS_FILE_FIELDS if name not in found]
    return f"{title}: has no {', '.join(lacking)}; give the config.json of such a model" if lacking else None


def has_linear_layers(args: Any) -> bool:
    """Return whether a heterogeneous model has a linear layer in place of attention or of an MLP."""
    blocks = [block for block in heterogeneous_layers(args) if isinstance(block, dict)]
    parts = [block.get(part) for block in blocks for part in ("attention", "ffn", "mlp")]
    described = [part for part in parts if isinstance(part, dict)]
    return any(part.get("replace_with_linear") and not part.get("no_op") for part in described)


def packs_documents(args: Any) -> bool:
    """Return whether samples say where documents begin, so that attention stays inside them.

    Args:
        args: Megatron's arguments; not every release has both options.
    """
    return bool(args.sft or getattr(args, "dataloader_inter_document_masking", False))


def builds_from_config() -> bool:
    """Return whether the release makes models from a `GPTModelConfig` that it fills itself, as 0.19 does.

    It leaves some options out. Up to 0.18 a function beside the script made the model from the command line.
    """
    from megatron.training import argument_utils

    return hasattr(argument_utils, "gpt_config_from_args")
