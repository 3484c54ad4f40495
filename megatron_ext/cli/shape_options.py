# SPDX-License-Identifier: Apache-2.0
"""Options that describe a GPT: a preset, Megatron's own flags, or a preset with some of them changed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_ext.config_options import in_option_names
from megatron_ext.errors import combine
from megatron_ext.phrases import as_option, short_number

if TYPE_CHECKING:
    from megatron_ext.params import GptShape

__all__ = ["MOST_EXPERTS", "add_shape_options", "add_topk_option", "read_shape", "shape_flags", "topk_problems"]

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size")

MOST_EXPERTS = 1_000_000
"""Of all layers together, a dense one counting as one: far more than any model has, and planned in minutes."""

_LARGEST = 10_000_000
"""Of a size, far beyond those of any model: the bytes of a tensor are still a number of 64 bits."""

_FIELDS = (
    *_REQUIRED,
    *("ffn_hidden_size", "num_query_groups", "kv_channels", "normalization", "qk_layernorm", "add_qkv_bias"),
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
)
"""Options whose names are those of fields of `GptShape`."""

_RENAMED = {"num_moe_experts": "--num-experts", "max_sequence_length": "--max-position-embeddings"}
"""Options of fields of `GptShape` that have other names."""


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Add `--model` and the flags of a GPT, under Megatron's names where it has them."""
    group = parser.add_argument_group("model", "A preset, Megatron's flags, or a preset with some flags changed.")
    group.add_argument(
        "--model", metavar="NAME", help="llama-3b, llama-7b, llama-13b or llama-32b, as in HotSPa's artifact"
    )
    for name, text in (
        ("--num-layers", "decoder layers"),
        ("--hidden-size", "width of the residual stream"),
        ("--num-attention-heads", "query heads"),
        ("--padded-vocab-size", "rows of the word embedding, padding included"),
        ("--ffn-hidden-size", "inner width of the MLP (default: 4 h, with --swiglu 8/3 h as in Megatron)"),
        ("--num-query-groups", "key and value heads (default: one per query head)"),
        ("--kv-channels", "size of one head (default: hidden size / heads)"),
        ("--num-experts", "routed experts per layer (default: a dense model)"),
        ("--moe-ffn-hidden-size", "inner width of one expert (default: that of the MLP)"),
        ("--moe-shared-expert-intermediate-size", "inner width of the shared expert (default: none)"),
        ("--max-position-embeddings", "rows of the position embedding, if it is learned"),
    ):
        group.add_argument(name, type=int, metavar="N", help=text)
    group.add_argument("--position-embedding-type", choices=("rope", "none", "learned_absolute"), default="rope")
    group.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), help="kind of norm (default LayerNorm)")
    for name, text in (
        ("--swiglu", "gated MLP"),
        ("--disable-bias-linear", "no bias in linear layers"),
        ("--add-qkv-bias", "a bias in the QKV projection nevertheless"),
        ("--qk-layernorm", "norms of queries and keys"),
        ("--untie-embeddings-and-output-weights", "an output layer of its own"),
    ):
        group.add_argument(name, action="store_true", default=None, help=text)


def add_topk_option(parser: argparse.ArgumentParser) -> None:
    """Add the flag for how many experts a token meets, for commands that tell times."""
    parser.add_argument("--moe-router-topk", type=int, default=1, metavar="K", help="experts per token (default 1)")


def shape_flags(options: argparse.Namespace) -> list[str]:
    """Return the flags of a GPT that were given."""
    names = ("model", *_FIELDS, "num_experts", "max_position_embeddings", "swiglu", "disable_bias_linear")
    given = [name for name in (*names, "untie_embeddings_and_output_weights") if getattr(options, name) is not None]
    if options.position_embedding_type != "rope":
        given.append("position_embedding_type")
    return [as_option(name) for name in given]


def topk_problems(topk: int, shape: GptShape) -> list[str]:
    """Return why a token of the model cannot be routed to that many experts."""
    experts = shape.num_moe_experts
    if 1 <= topk <= (experts or 1):
        return []
    wanted = f"from 1 to the number of experts, {experts}" if experts else "1, because the model has no experts"
    return [f"--moe-router-topk is {topk}; it must be {wanted}"]


def read_shape(options: argparse.Namespace) -> GptShape:
    """Return the GPT that the options describe, its parameters in bf16.

    Raises:
        UserError: the preset is not known, a size is missing, or sizes contradict each other.
    """
    import torch

    from megatron_ext.hot_switch import PRESETS
    from megatron_ext.params import GptShape

    given = _given(options)
    if options.model is not None:
        if options.model not in PRESETS:
            raise combine([f"'{options.model}' is not known; use one of {', '.join(PRESETS)}"], "--model")
        with _in_options():
            shape = replace(PRESETS[options.model], **given)
        return _planned(shape, options)
    missing = [
        f"{as_option(name)} is missing; give it, or a preset with --model"
        for name in _REQUIRED
        if name not in given
    ]
    if missing:
        raise combine(missing, "model")
    width = 4 * given["hidden_size"]
    if given.get("gated_linear_unit"):
        width = width * 2 // 3 // 64 * 64
    defaults = {"ffn_hidden_size": width, "share_embeddings_and_output_weights": True, "dtype": torch.bfloat16}
    with _in_options():
        shape = GptShape(**{**defaults, **given})
    return _planned(shape, options)


@contextmanager
def _in_options() -> Iterator[None]:
    """Let a model that cannot be made be refused in the words of the options.

    Raises:
        UserError: in place of a `ParamsError`.
    """
    from megatron_ext.params import ParamsError

    try:
        yield
    except ParamsError as error:
        said = in_option_names(str(error).removeprefix("GPT shape: "), _FIELDS, _RENAMED)
        raise combine([said], "model") from None


def _planned(shape: GptShape, options: argparse.Namespace) -> GptShape:
    """Return a model that plans can be made for in reasonable time.

    Raises:
        UserError: it has too many layers or experts, or heads of no whole number of channels.
    """
    if options.kv_channels is None and shape.kv_channels is None and shape.hidden_size % shape.num_attention_heads:
        problem = (
            f"--hidden-size is {shape.hidden_size}, which is not a multiple of --num-attention-heads "
            f"{shape.num_attention_heads}; change one of them, or give --kv-channels"
        )
        raise combine([problem], "model")
    experts = shape.num_moe_experts or 1
    if shape.num_layers * experts <= MOST_EXPERTS:
        return shape
    each = f", with {short_number(experts)} experts in each" if shape.num_moe_experts else ""
    problem = f"is {short_number(shape.num_layers)}{each}; models of more than {MOST_EXPERTS} in all cannot be planned"
    raise combine([problem], "--num-layers")


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of `GptShape` that the command line sets.

    Raises:
        UserError: a size is beyond all models', or missing.
    """
    too_large = [
        f"{as_option(name)} is {short_number(size)}; give at most {_LARGEST}"
        for name in (*_FIELDS, "max_position_embeddings")
        if name != "num_layers" and isinstance(size := getattr(options, name), int) and size > _LARGEST
    ]
    if too_large:
        raise combine(too_large, "model")
    given = {name: getattr(options, name) for name in _FIELDS}
    given["num_moe_experts"] = options.num_experts
    given["gated_linear_unit"] = options.swiglu
    given["add_bias_linear"] = False if options.disable_bias_linear else None
    given["share_embeddings_and_output_weights"] = False if options.untie_embeddings_and_output_weights else None
    if options.position_embedding_type == "learned_absolute":
        if options.max_position_embeddings is None:
            raise combine(["give it with --position-embedding-type learned_absolute"], "--max-position-embeddings")
        given["max_sequence_length"] = options.max_position_embeddings
    return {name: value for name, value in given.items() if value is not None}
