# SPDX-License-Identifier: Apache-2.0
"""What a rank sends in an inner step, by cause.

A ring among n ranks sends (n - 1) / n of a buffer from each for a reduce-scatter or an all-gather, and twice that for
an all-reduce. The buffers of gradients and parameters are Megatron's own; messages of activations are by formula, with
s x b x h of a micro-batch's positions on a rank, its samples and the hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_ext.explain.lone_rank import LoneRank
from megatron_ext.explain.rank_figures import TrafficUse
from megatron_ext.params import GptShape
from megatron_ext.params.ddp_traffic import ddp_bytes
from megatron_ext.params.layer_parts import LayerPart

__all__ = ["activation_traffic", "traffic_of"]


def traffic_of(
    rank: LoneRank, shape: GptShape, parts: Sequence[LayerPart], *, stage: int, micro_batches: int
) -> list[TrafficUse]:
    """Return what a rank sends in every inner step.

    Args:
        rank: the rank.
        shape: of the model.
        parts: what its layers are made of, those of multi-token prediction too.
        stage: its pipeline stage.
        micro_batches: of a step.
    """
    found = [TrafficUse(cause=cause, nbytes=nbytes, per="step") for cause, nbytes in ddp_bytes(rank.model).items()]
    found += activation_traffic(rank.asked, shape, parts, stage=stage, micro_batches=micro_batches)
    return [use for use in found if use.nbytes]


def activation_traffic(
    asked: Any, shape: GptShape, parts: Sequence[LayerPart], *, stage: int, micro_batches: int
) -> Iterator[TrafficUse]:
    """Yield the activations that a rank sends in every inner step, by cause; see ``traffic_of``."""
    tp, pp, ep = asked.tensor_model_parallel_size, asked.pipeline_model_parallel_size, asked.expert_model_parallel_size
    positions = asked.seq_length // asked.context_parallel_size
    message = positions * asked.micro_batch_size * asked.hidden_size * asked.params_dtype.itemsize
    # An all-reduce of each part forward and one backward; with sequence parallelism they are pairs of halves.
    reduced = micro_batches * len(parts) * 2 * 2 * message * (tp - 1) // tp
    yield TrafficUse(cause=f"activations (tensor parallel, TP {tp})", nbytes=reduced, per="step", by_formula=True)
    chunks = asked.virtual_pipeline_model_parallel_size or 1
    borders = chunks * 2 - (stage == 0) - (stage == pp - 1)
    handed = message // (tp if asked.sequence_parallel else 1)
    yield TrafficUse(
        cause=f"activations and their gradients (pipeline, PP {pp})",
        nbytes=micro_batches * borders * handed if pp > 1 else 0,
        per="step",
        by_formula=True,
    )
    if asked.context_parallel_size > 1:
        yield from _context_parallel(asked, shape, parts, micro_batches)
    with_experts = parts.count("experts")
    if with_experts and ep > 1:
        # To the experts and back, forward and backward, of the positions that a tensor-parallel rank has.
        routed = message * shape.expert_width // (shape.hidden_size * tp) * asked.moe_router_topk * (ep - 1) // ep
        yield TrafficUse(
            cause=f"tokens to experts and back (EP {ep})",
            nbytes=micro_batches * with_experts * 4 * routed,
            per="step",
            by_formula=True,
        )


def _context_parallel(
    asked: Any, shape: GptShape, parts: Sequence[LayerPart], micro_batches: int
) -> Iterator[TrafficUse]:
    cp, tp = asked.context_parallel_size, asked.tensor_model_parallel_size
    kind = asked.cp_comm_type if isinstance(asked.cp_comm_type, str) else (asked.cp_comm_type or ["p2p"])[0]
    groups = asked.num_query_groups if asked.group_query_attention else asked.num_attention_heads
    key = value = asked.kv_channels
    if asked.multi_latent_attention:
        groups, key, value = asked.num_attention_heads, asked.qk_head_dim + asked.qk_pos_emb_head_dim, asked.v_head_dim
    if kind == "a2a":
        # Queries, keys, values and the result: one all-to-all of each forward and of each gradient backward.
        heads = asked.num_attention_heads
        sent = 2 * (heads * (key + value) + groups * (key + value)) * (cp - 1) // cp
    else:
        # Keys and values go round forward, and backward they do again, with their gradients.
        sent = 3 * groups * (key + value) * (cp - 1)
    sent *= parts.count("attention")
    if shape.latent_attention is not None and shape.sparse_indexer is not None:
        # Every rank gathers all latents and what the indexer compares with, whole, and their gradients go back.
        latent = shape.latent_attention.kv_lora_rank + shape.latent_attention.qk_pos_emb_head_dim
        sent += parts.count("sparse_attention") * 2 * (latent + shape.sparse_indexer.head_dim) * (cp - 1) * tp
    for scans, sizes in (
        (parts.count("delta_net"), shape.delta_net),
        (parts.count("state_space"), shape.state_space),
    ):
        if sizes is not None:
            # What is projected in, and the result: all-to-alls as above, whatever attention does.
            sent += scans * 2 * (sum(sizes.projected.values()) + sizes.inner_size) * (cp - 1) // cp
    tokens = asked.seq_length // cp * asked.micro_batch_size
    yield TrafficUse(
        cause=f"keys and values (context parallel, CP {cp})",
        nbytes=micro_batches * tokens * sent // tp * asked.params_dtype.itemsize,
        per="step",
        by_formula=True,
    )
