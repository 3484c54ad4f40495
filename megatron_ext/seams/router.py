# SPDX-License-Identifier: Apache-2.0
"""Seam: the auxiliary losses of Megatron's routers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_ext.hooks import WeighsExperts, hooks
from megatron_ext.patching import Patch
from megatron_ext.patching.bound_arguments import bound_with_defaults

__all__ = ["document_patches", "documents_of_rows", "metrics_apart", "padding_patches", "patches"]

_DOCUMENTS = "_documents_of_rows"


def patches() -> list[Patch]:
    """Return the patches of this seam."""
    return [
        Patch(
            name="router/load-balancing",
            target="megatron.core.transformer.moe.moe_utils:switch_load_balancing_loss_func",
            wrap=_wrap_loss,
            serves=(WeighsExperts.expert_weights,),
            parameters=("tokens_per_expert", "num_experts"),
            reason="let features weight the experts' token counts in the load-balancing losses",
        )
    ]


def padding_patches() -> list[Patch]:
    """Return the patches that make the losses right where rows have padding."""
    return [
        Patch(
            name="router/token-counts",
            target="megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
            wrap=_wrap_counts,
            parameters=("routing_map", "reduce_group", "topk", "with_padding_mask"),
            reason="weight the loss of a padded row alike on all tensor-parallel ranks, and that of an empty one by 0",
        ),
        Patch(
            name="router/bias-counts",
            target="megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias",
            wrap=_wrap_bias_counts,
            parameters=("routing_map", "padding_mask"),
            reason="Megatron 0.18 and 0.19 leave padding out of the counts that move experts' biases by a mask of the "
            "wrong shape, and fail",
        ),
    ]


def document_patches() -> list[Patch]:
    """Return the patches that take losses by sequence over documents, of which rows have several."""
    return [
        Patch(
            name="router/sequence-losses",
            target="megatron.core.transformer.moe.router:TopKRouter._apply_seq_aux_loss",
            wrap=_wrap_sequence_loss,
            parameters=("probs", "scores_for_aux_loss", "routing_map", "seq_length", "bsz", "with_padding_mask"),
            reason="take the load-balancing loss by sequence over each document of a packed row",
        )
    ]


@contextmanager
def documents_of_rows(routers: Sequence[Any], documents: Sequence[tuple[Any, int]]) -> Iterator[None]:
    """Let losses by sequence be those of documents in here.

    A router computes its losses once for each micro-batch, in order: in the forward pass, or, where that is computed
    again in the backward pass, there alone, because in the forward pass autograd is off then. One in a layer for
    multi-token prediction that is repeated (`--mtp-use-repeated-layer`) computes them for each token that it predicts.

    Args:
        routers: Megatron's `TopKRouter`s with a loss by sequence.
        documents: of each micro-batch the number of the document of every token that a router sees here, int64 of
            shape (tokens,), any for padding; and how many documents there are.

    Raises:
        RuntimeError: a router has not computed its loss by sequence for each of them.
    """
    for router in routers:
        times = router.config.mtp_num_layers if router.config.mtp_use_repeated_layer and router.is_mtp_layer else 1
        setattr(router, _DOCUMENTS, [each for each in reversed(documents) for _ in range(times)])
    try:
        yield
        left = max((len(getattr(router, _DOCUMENTS)) for router in routers), default=0)
        if left:
            raise RuntimeError(f"routers have no loss by sequence of {left} of {len(documents)} micro-batches")
    finally:
        for router in routers:
            delattr(router, _DOCUMENTS)


@contextmanager
def metrics_apart() -> Iterator[dict[str, Any]]:
    """Keep what routers report in here apart from what they report outside.

    Yields:
        a mapping that has, afterwards, the sums over this rank's micro-batches by name, each of shape (layers,).
    """
    from megatron.core.transformer.moe import moe_logging

    before, tracker = moe_logging.get_moe_metrics_tracker(), moe_logging.MoEMetricsTracker()
    found: dict[str, Any] = {}
    moe_logging.set_moe_metrics_tracker(tracker)
    try:
        yield found
    finally:
        moe_logging.set_moe_metrics_tracker(before)
        found.update({name: entry.values for name, entry in tracker.metrics.items()})


def _wrap_bias_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply_expert_bias(self: Any, routing_map: Any, padding_mask: Any = None) -> None:
        # Padding is left out here: releases disagree on the shape of the mask.
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.view(-1, 1)
        original(self, routing_map)

    return apply_expert_bias


def _wrap_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_tokens_per_expert_and_token_count(*args: Any, **kwargs: Any) -> Any:
        bound = bound_with_defaults(signature, args, kwargs)
        per_expert, local, total = original(*args, **kwargs)
        if not bound.arguments["with_padding_mask"]:
            return per_expert, local, total
        # Sequence parallelism cuts a row without looking at where its padding lies, but every part is to weigh the
        # same. Of an empty row the loss would be 0 / 0.
        return per_expert, total / bound.arguments["reduce_group"].size(), total.clamp(min=1)

    return get_tokens_per_expert_and_token_count


def _wrap_sequence_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply_seq_aux_loss(
        self: Any, probs: Any, scores_for_aux_loss: Any, routing_map: Any, *args: Any, **kwargs: Any
    ) -> Any:
        coefficient, told = self.get_aux_loss_coeff("seq_aux_loss"), getattr(self, _DOCUMENTS, None)
        if not coefficient or told is None:
            return original(self, probs, scores_for_aux_loss, routing_map, *args, **kwargs)
        loss, tokens = _loss_by_document(self, scores_for_aux_loss, routing_map, coefficient, *told.pop())
        group = self.tp_cp_group
        return self.attach_and_log_load_balancing_loss(
            probs, coefficient, loss, "seq_load_balancing_loss", group, valid_token_count=tokens / group.size()
        )

    return apply_seq_aux_loss


def _loss_by_document(
    router: Any, scores: Any, routing_map: Any, coefficient: float, numbers: Any, count: int
) -> tuple[Any, Any]:
    """Return the mean of the documents' losses, weighted by their tokens, and the number of tokens.

    Padding has neither scores nor routes.
    """
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
    from megatron.core.transformer.moe import router as module

    experts = router.config.num_moe_experts
    routes = scores.new_zeros(count, experts).index_add(0, numbers, routing_map.to(scores.dtype))
    routes = reduce_from_tensor_model_parallel_region(routes, router.tp_cp_group)
    lengths = routes.sum(dim=1, keepdim=True) / router.topk
    tokens = lengths.sum()
    # Megatron divides by the square of a length that all have in common.
    weights = 1.0 / (lengths.clamp(min=1) * tokens.clamp(min=1))
    probs = scores.new_zeros(count, experts).index_add(0, numbers, scores) * weights
    loss = module.switch_load_balancing_loss_func(
        probs=probs.reshape(1, -1),
        tokens_per_expert=routes.reshape(-1),
        total_num_tokens=1,
        topk=router.topk,
        num_experts=experts,
        moe_aux_loss_coeff=coefficient,
    )
    return loss, tokens


def _wrap_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def switch_load_balancing_loss_func(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        counts, experts = bound.arguments["tokens_per_expert"], bound.arguments["num_experts"]
        weights = hooks.expert_weights(experts)
        if weights is not None:
            # The loss by sequence has the counts of all sequences, one after the other.
            repeated = weights.to(counts.device).repeat(counts.numel() // experts)
            bound.arguments["tokens_per_expert"] = counts * repeated
        return original(*bound.args, **bound.kwargs)

    return switch_load_balancing_loss_func
