# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a strategy: one sentence per problem, each with its fix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from megatron_ext.hot_switch.strategies.strategy import RECOMPUTE, Strategy
from megatron_ext.params import GptShape, ParamsError, Placement, uneven_layers

__all__ = ["bucket_order", "bucket_problems", "model_problems", "size_problems", "sizes_are_usable"]

_SIZES = ("dp", "tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch_size", "micro_batch_group")


def bucket_order(count: int) -> list[int]:
    """Return the bucket of each of `count` strategies, home first; bucket 0 has the longest sequences."""
    return [0, *reversed(range(1, count))]


def sizes_are_usable(strategy: Strategy) -> bool:
    """Return whether all sizes are positive, so that one can calculate with them."""
    return all(size is None or size >= 1 for size in (getattr(strategy, name) for name in _SIZES))


def size_problems(strategy: Strategy) -> list[str]:
    """Return the problems of a strategy that do not depend on the model."""
    name = f"strategy {strategy.label}"
    problems = [
        f"{name}: {field} is {size}; use 1 or more"
        for field in _SIZES
        if (size := getattr(strategy, field)) is not None and size < 1
    ]
    if strategy.recompute not in RECOMPUTE:
        problems.append(f"{name}: recompute is '{strategy.recompute}'; use one of {', '.join(RECOMPUTE)}")
    if strategy.sequence_parallel and strategy.tp == 1:
        problems.append(f"{name}: sequence_parallel needs tp > 1; leave it out")
    if strategy.vpp > 1 and strategy.pp == 1:
        problems.append(f"{name}: vpp is {strategy.vpp}, but interleaving needs pp > 1; use vpp 1 or more stages")
    group = strategy.micro_batch_group
    if group is not None and 1 <= group < strategy.pp and strategy.vpp > 1:
        problems.append(f"{name}: micro_batch_group is {group}, but a group must fill {strategy.pp} stages; raise it")
    if not problems:
        experts = strategy.expert_tp * strategy.ep * strategy.pp
        if strategy.world_size % experts:
            problems.append(
                f"{name}: {strategy.world_size} ranks cannot be divided by etp*ep*pp = {experts}; change ep or etp"
            )
    return problems


def bucket_problems(sizes: Sequence[int], strategies: Sequence[Strategy | None], seq_length: int | None) -> list[str]:
    """Return the problems of bucket sizes, of which there must be one more than strategies."""
    problems = []
    text = " ".join(map(str, sizes))
    if len(sizes) != len(strategies) + 1:
        who = "1 strategy needs" if len(strategies) == 1 else f"{len(strategies)} strategies need"
        problems.append(
            f"{who} {len(strategies) + 1} bucket sizes (every bucket's upper bound, then 0), but there are "
            f"{len(sizes)}: {text or 'none'}"
        )
    if any(upper <= lower for upper, lower in pairwise(sizes)):
        problems.append(f"bucket sizes {text} do not descend; sort them from the longest to 0, each only once")
    if sizes and sizes[-1] != 0:
        problems.append(f"the last bucket size is {sizes[-1]}; end the list with 0, so that no short sequence is lost")
    if sizes and seq_length is not None and sizes[0] != seq_length:
        problems.append(
            f"the first bucket size is {sizes[0]}, but the sequence length is {seq_length}; make them equal"
        )
    if not problems:
        for strategy, bucket in zip(strategies, bucket_order(len(strategies)), strict=True):
            if strategy is not None and sizes_are_usable(strategy):
                problems += _row_problems(strategy, sizes[bucket])
    return problems


def model_problems(strategy: Strategy, shape: GptShape, together: Sequence[Strategy]) -> list[str]:
    """Return why a strategy cannot hold a model.

    Args:
        strategy: with usable sizes.
        shape: the model.
        together: all strategies of the list, for fixes that must suit all of them.
    """
    name, tp = f"strategy {strategy.label}", strategy.tp
    problems = []
    if shape.num_attention_heads % tp:
        problems.append(
            f"{name}: {shape.num_attention_heads} attention heads cannot be divided over tp = {tp}; "
            f"use a tp that divides {shape.num_attention_heads}"
        )
    else:
        problems += [
            f"{name}: tp = {tp} is neither a divisor nor a multiple of the {groups} query groups; use one that is"
            for groups in sorted({shape.of_layer(layer).query_groups for layer in range(shape.num_layers)})
            if groups % tp and tp % groups
        ]
    for what, width in _widths(shape):
        if width % tp:
            problems.append(f"{name}: {what} {width} cannot be divided over tp = {tp}; change one of them")
    if shape.padded_vocab_size % tp:
        multiple = math.lcm(*(other.tp for other in together))
        padded = math.ceil(shape.padded_vocab_size / multiple) * multiple
        problems.append(
            f"{name}: a vocabulary of {shape.padded_vocab_size} rows cannot be divided over tp = {tp}; pad it to "
            f"{padded}, which suits every strategy of the list"
        )
    problems += _delta_net_problems(strategy, shape)
    problems += _expert_problems(strategy, shape)
    problems += _pipeline_problems(strategy, shape)
    if not problems and not size_problems(strategy):
        # What the parameter view refuses beyond that is an error of this list, too.
        try:
            Placement(shape, strategy.layout(shape.num_layers))
        except ParamsError as error:
            problems.append(f"{name}: {error}")
    return problems


def _row_problems(strategy: Strategy, length: int) -> list[str]:
    multiple = strategy.row_multiple
    if length % multiple == 0:
        return []
    return [
        f"strategy {strategy.label}: rows of its bucket, {length} tokens, cannot be divided by {multiple} (2*cp for "
        f"context parallelism, tp for sequence parallelism); change the bucket size to a multiple of {multiple}"
    ]


def _widths(shape: GptShape) -> list[tuple[str, int]]:
    """What tensor parallelism cuts in addition to heads and vocabulary, under the names of the shape's fields."""
    widths = []
    layers = range(shape.num_layers)
    dense = {shape.of_layer(layer).ffn_hidden_size for layer in layers if "mlp" in shape.parts_of(layer)}
    widths += [("ffn_hidden_size", width) for width in sorted(dense)]
    if any(part in shape.parts_of(layer) for layer in layers for part in ("attention_linear", "mlp_linear")):
        widths.append(("hidden_size", shape.hidden_size))
    if shape.num_moe_experts and shape.moe_shared_expert_intermediate_size is not None:
        widths.append(("moe_shared_expert_intermediate_size", shape.moe_shared_expert_intermediate_size))
    latent = shape.latent_attention
    if latent is not None and latent.cut_down_projections:
        common = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
        widths.append(("kv_lora_rank + qk_pos_emb_head_dim", common))
        if latent.q_lora_rank is not None:
            widths.append(("q_lora_rank", latent.q_lora_rank))
    return widths


def _delta_net_problems(strategy: Strategy, shape: GptShape) -> list[str]:
    if shape.delta_net is None:
        return []
    heads = (
        ("linear_num_key_heads", shape.delta_net.key_heads),
        ("linear_num_value_heads", shape.delta_net.value_heads),
    )
    return [
        f"strategy {strategy.label}: {what} {count} cannot be divided over tp*cp = {strategy.tp * strategy.cp}; change "
        "one of them"
        for what, count in heads
        if count % (strategy.tp * strategy.cp)
    ]


def _expert_problems(strategy: Strategy, shape: GptShape) -> list[str]:
    name, experts = f"strategy {strategy.label}", shape.num_moe_experts
    if not experts:
        return [f"{name}: ep is {strategy.ep}, but the model has no experts; use ep 1"] if strategy.ep > 1 else []
    problems = []
    if experts % strategy.ep:
        problems.append(
            f"{name}: {experts} experts cannot be divided over ep = {strategy.ep}; use an ep that divides them"
        )
    etp = strategy.expert_tp
    if shape.expert_ffn_size % etp:
        problems.append(
            f"{name}: moe_ffn_hidden_size {shape.expert_ffn_size} cannot be divided over etp = {etp}; "
            f"change one of them"
        )
    return problems


def _pipeline_problems(strategy: Strategy, shape: GptShape) -> list[str]:
    name, layers = f"strategy {strategy.label}", shape.num_layers
    chunks = strategy.pp * strategy.vpp
    if strategy.stage_layers is not None:
        return _listed_problems(strategy, layers)
    if strategy.first_stage_layers is None and strategy.last_stage_layers is None:
        if layers % chunks == 0:
            return []
        return [
            f"{name}: {layers} layers cannot be divided over pp*vpp = {chunks} chunks; use sizes that divide them, or "
            f"first_stage_layers and last_stage_layers in a YAML file"
        ]
    if strategy.pp == 1:
        return [f"{name}: first_stage_layers and last_stage_layers are for pp above 1; leave them out"]
    try:
        counts = uneven_layers(
            layers,
            pp=strategy.pp,
            vpp=strategy.vpp,
            first=strategy.first_stage_layers,
            last=strategy.last_stage_layers,
        )
    except ParamsError as error:
        return [f"{name}: {error}; change first_stage_layers or last_stage_layers"]
    if min(counts) < 1:
        return [
            f"{name}: its stages would have {', '.join(map(str, counts))} of {layers} layers, and each needs one; "
            "change first_stage_layers or last_stage_layers"
        ]
    return []


def _listed_problems(strategy: Strategy, layers: int) -> list[str]:
    """Return the problems of the layers that a strategy lists by chunk."""
    name, counts, chunks = f"strategy {strategy.label}", strategy.stage_layers or (), strategy.pp * strategy.vpp
    if strategy.first_stage_layers is not None or strategy.last_stage_layers is not None:
        return [f"{name}: stage_layers lists all layers; leave first_stage_layers and last_stage_layers out"]
    if len(counts) != chunks:
        return [f"{name}: stage_layers lists {len(counts)} chunks, but pp*vpp is {chunks}; give one number for each"]
    if sum(counts) != layers:
        return [f"{name}: stage_layers adds up to {sum(counts)}, but the model has {layers} layers; change it"]
    if min(counts) < 0 or not all(counts[1:-1]):
        return [f"{name}: every chunk but the first and the last needs a layer; change stage_layers"]
    return []
