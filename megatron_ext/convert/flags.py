# SPDX-License-Identifier: Apache-2.0
"""Megatron's command line for a model, and a model from the arguments that a checkpoint keeps."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from megatron_ext.convert.counterparts import ONLY
from megatron_ext.convert.settings import NORMS_OVER_HEADS, PLAIN_QUERIES, ModelSettings
from megatron_ext.errors import UserError
from megatron_ext.phrases import as_option

__all__ = ["flag_of_field", "flags_of", "known_tokens", "settings_of"]

_NAMES = {"layernorm_epsilon": "--norm-epsilon"}
_DERIVED = (
    "add_bias_linear",
    "num_query_groups",
    "vocab_size",
    "moe_layer_freq",
    "qk_head_dim",
    "qk_norm_over_heads",
    "rope_type",
)
"""Fields whose flags are not simply their names."""

_LATENT = (
    "kv_lora_rank",
    "q_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_scaling_factor",
    "mscale",
    "mscale_all_dim",
)
"""Fields that count with multi-latent attention alone."""


_SAID_ALWAYS = ("attention_dropout", "hidden_dropout")
"""Fields whose default is another in Megatron."""

_CHOOSES = ("sinkhorn", "quantile_balancing")
"""Ways of balancing that decide which experts a token is given to."""


def flag_of_field(name: str) -> str:
    """Return the flag of Megatron's command line that a field of the settings has."""
    return _NAMES.get(name, as_option(name))


def flags_of(settings: ModelSettings) -> list[str]:
    """Return the flags of Megatron's command line that make the model.

    The sequence length, how the model is cut and how it is trained are not among them.
    """
    flags = ["--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"]
    if not settings.add_bias_linear:
        flags.append("--disable-bias-linear")
    arguments = settings.arguments()
    if arguments["group_query_attention"]:
        flags += ["--group-query-attention", "--num-query-groups", str(settings.num_query_groups)]
    if settings.multi_latent_attention:
        # Without --rope-type Megatron takes yarn there.
        flags += ["--multi-latent-attention", "--qk-head-dim", str(settings.qk_head_dim)]
        flags += ["--rope-type", settings.rope_type]
    if settings.layer_spec is not None:
        flags += ["--spec", *settings.layer_spec]
    if settings.moe_layer_freq != 1:
        flags += ["--moe-layer-freq", str(arguments["moe_layer_freq"]).replace(" ", "")]
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        is_default = entry.default is not MISSING and value == entry.default
        if entry.name in _DERIVED or (is_default and entry.name not in _SAID_ALWAYS):
            continue
        flag = flag_of_field(entry.name)
        if isinstance(value, bool):
            flags += [flag] if value else []
        else:
            flags += [flag, str(value)]
    return flags


def settings_of(args: Any, vocab_size: int | None = None) -> ModelSettings:
    """Return the model that Megatron's arguments describe.

    Args:
        args: those of a checkpoint.
        vocab_size: rows of the vocabulary without padding; by default all rows of the embedding, unless a
            conversion wrote the arguments.

    Raises:
        UserError: an argument that changes what the model computes has no counterpart; all are named.
    """
    problems = [
        f"{name} is {getattr(args, name)!r} (only {value!r} converts)"
        for name, value in ONLY.items()
        if getattr(args, name, value) != value
    ]
    spec = getattr(args, "spec", None)
    if spec is not None and tuple(spec) not in (PLAIN_QUERIES, NORMS_OVER_HEADS):
        problems.append(f"spec is {' '.join(spec)!r} (layers of your own do not convert)")
    balancing = getattr(args, "moe_router_load_balancing_type", "aux_loss")
    balancing = balancing[0] if isinstance(balancing, list) else balancing
    if args.num_experts is not None and balancing in _CHOOSES:
        problems.append(f"moe_router_load_balancing_type is {balancing!r} (a softmax or a sigmoid alone converts)")
    if problems:
        raise UserError("convert: the model has what a Hugging Face layout cannot say: " + "; ".join(problems))
    values: dict[str, Any] = {
        entry.name: getattr(args, entry.name, entry.default) for entry in fields(ModelSettings)
    }
    values["qk_norm_over_heads"] = spec is not None and tuple(spec) == NORMS_OVER_HEADS
    values["vocab_size"] = _rows(args, vocab_size)
    values["moe_layer_freq"] = _layer_pattern(args)
    values["moe_router_load_balancing_type"] = balancing
    if isinstance(values["moe_aux_loss_coeff"], list):
        # One for each kind of balancing; other families' training has one.
        values["moe_aux_loss_coeff"] = values["moe_aux_loss_coeff"][0]
    if not getattr(args, "group_query_attention", False):
        values["num_query_groups"] = args.num_attention_heads
    neutral = set()
    if getattr(args, "multi_latent_attention", False):
        values["kv_channels"] = args.hidden_size // args.num_attention_heads  # unused there
    else:
        neutral |= set(_LATENT)
    if args.num_experts is None:
        neutral |= {name for name in values if name.startswith("moe_")}
    elif values["moe_ffn_hidden_size"] is None:
        values["moe_ffn_hidden_size"] = args.ffn_hidden_size
    if values["moe_router_topk_scaling_factor"] is None:
        neutral.add("moe_router_topk_scaling_factor")
    if not values["use_rope_scaling"]:
        neutral.add("rope_scaling_factor")
    if values["rope_type"] == "rope":
        neutral |= {"rotary_scaling_factor", "mscale", "mscale_all_dim"}
    values |= {entry.name: entry.default for entry in fields(ModelSettings) if entry.name in neutral}
    return ModelSettings(**values)


def known_tokens(args: Any) -> int | None:
    """Return how many rows of the vocabulary are tokens; None where the arguments are a job's, and do not say.

    Args:
        args: those of a checkpoint.
    """
    return getattr(args, "vocab_size", None) if getattr(args, "tokenizer_type", None) is None else None


def _rows(args: Any, vocab_size: int | None) -> int:
    known = vocab_size or known_tokens(args)
    if known is None:
        # A job's --vocab-size is not what its tokenizer has: NullTokenizer adds one.
        known = getattr(args, "padded_vocab_size", None)
    if known is None:
        raise UserError("convert: the checkpoint does not say how many rows its vocabulary has; give --vocab-size")
    return int(known)


def _layer_pattern(args: Any) -> int | tuple[int, ...]:
    """1 where all layers have experts (or the model none), as in a checkpoint; else 0 and 1 for each layer."""
    layers = args.moe_layer_freq
    if args.num_experts is None or layers == 1:
        return 1
    if isinstance(layers, int):
        return tuple(int(layer % layers == 0) for layer in range(args.num_layers))
    return tuple(int(layer) for layer in layers)
