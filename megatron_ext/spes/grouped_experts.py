# SPDX-License-Identifier: Apache-2.0
"""Megatron's grouped experts (`TEGroupedMLP`) of which some are frozen.

Transformer Engine multiplies by all experts of a rank in one call, and asks the first one's weight alone whether there
are to be gradients. So the experts that train and those that do not are multiplied by two calls. The layers keep their
parameters, by their names, and with them everything that reads those (checkpoints, rounds, gradient buffers); only who
multiplies by them changes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.spes.token_blocks import TokenBlocks

__all__ = ["train_some_experts"]

_HOOKS = "wgrad_accumulation_and_reduce_hooks"


def train_some_experts(chunk: torch.nn.Module) -> None:
    """Let grouped experts get gradients of those weights that ask for them, and of no others.

    Args:
        chunk: a model chunk whose frozen parameters are frozen by now; its `TEGroupedMLP`s are changed in place.

    Raises:
        UserError: a part of an expert is frozen and the rest is not.
    """
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    for name, module in chunk.named_modules():
        if isinstance(module, TEGroupedMLP):
            _train_some(name, module)


def _train_some(name: str, experts: Any) -> None:
    linears = (experts.linear_fc1, experts.linear_fc2)
    trained = _trained(linears[0])
    if any(_trained(linear) != trained for linear in linears):
        raise UserError(f"spes: {name} has experts of which a part is frozen; freeze all of an expert or nothing of it")
    if all(trained):
        return
    blocks = TokenBlocks.of(trained)
    for linear in linears:
        if any(trained):
            parts = _Parts(linear, blocks, trained)
            linear.forward, linear.backward_dw = parts.forward, parts.backward_dw
        else:
            # What has put nothing aside has nothing to get from there.
            linear.backward_dw = _no_gradients
    if not blocks.is_as_it_was:
        experts.forward = _in_order(experts.forward, blocks)


def _trained(linear: Any) -> tuple[bool, ...]:
    return tuple(getattr(linear, f"weight{expert}").requires_grad for expert in range(linear.num_gemms))


def _no_gradients() -> None:
    """Do what `backward_dw` has to do for frozen experts."""


def _in_order(original: Callable[..., Any], blocks: TokenBlocks) -> Callable[..., Any]:
    """Return the forward pass of experts whose linear layers are given the blocks of tokens group by group."""

    @functools.wraps(original)
    def forward(
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        counts = tokens_per_expert.tolist()
        output, bias = original(
            blocks.arrange(permuted_local_hidden_states, counts),
            # Megatron reads them on the host only.
            torch.tensor([counts[expert] for expert in blocks.order]),
            blocks.arrange(permuted_probs, counts),
            *rest,
            **kwargs,
        )
        return blocks.restore(output, counts), bias

    return forward


class _Parts:
    """Layers without parameters of their own that do the work of one, a group of experts each."""

    def __init__(self, linear: Any, blocks: TokenBlocks, trained: Sequence[bool]) -> None:
        self._linear = linear
        self._groups = blocks.groups
        self._is_trained = tuple(trained[group[0]] for group in blocks.groups)
        # Made when they are needed first: until then parameters may be replaced.
        self._layers: tuple[Any, ...] | None = None

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Do as Megatron's `TEGroupedLinear`, given the blocks of tokens group by group."""
        linear = self._linear
        if self._layers is None:
            self._layers = tuple(_layer_of(linear, group) for group in self._groups)
        outputs: list[torch.Tensor] = []
        biases: list[torch.Tensor] = []
        splits = [m_splits[: len(self._groups[0])], m_splits[len(self._groups[0]) :]]
        groups = torch.split(x, [sum(split) for split in splits])
        for layer, rows, split in zip(self._layers, groups, splits, strict=True):
            layer.train(linear.training)
            layer.is_first_microbatch = linear.is_first_microbatch
            output, bias = layer(rows, split)
            outputs.append(output)
            biases += bias or []
        linear.is_first_microbatch = False
        return torch.cat(outputs), biases or None

    def backward_dw(self) -> None:
        """Do as Megatron's, which fails where frozen experts have put no gradients aside."""
        for layer, is_trained in zip(self._layers or (), self._is_trained, strict=False):
            if is_trained:
                layer.backward_dw()


def _layer_of(linear: Any, group: Sequence[int]) -> Any:
    """Return a layer of some experts of `linear`, with its parameters: it is not a part of the model itself.

    Args:
        linear: Megatron's `TEGroupedLinear`, by columns or rows.
        group: the experts by their number on the rank.
    """
    from megatron.core.utils import get_pg_size

    config = copy.copy(linear.config)
    # So that it makes no weights.
    config.init_model_with_meta_device, config.use_cpu_initialization = True, False
    sizes = {"input_size": linear.in_features, "output_size": linear.out_features}
    # It knows what this rank has, and is made from what all ranks have together.
    ranks = get_pg_size(linear._pg_collection.expt_tp)
    sizes["output_size" if _by_columns(linear) else "input_size"] *= ranks
    layer = type(linear)(
        len(group),
        **sizes,
        config=config,
        init_method=torch.nn.init.zeros_,
        bias=linear.use_bias,
        skip_bias_add=linear.te_return_bias,
        is_expert=True,
        pg_collection=linear._pg_collection,
    )
    for place, expert in enumerate(group):
        # Without biases there are empty tensors that are no parameters.
        for kind in ("weight", "bias"):
            setattr(layer, f"{kind}{place}", getattr(linear, f"{kind}{expert}"))
    if hasattr(linear, _HOOKS):
        # Who waits for gradients that are computed later has told the layer of the model.
        setattr(layer, _HOOKS, getattr(linear, _HOOKS))
    return layer


def _by_columns(linear: Any) -> bool:
    from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear

    return isinstance(linear, TEColumnParallelGroupedLinear)
