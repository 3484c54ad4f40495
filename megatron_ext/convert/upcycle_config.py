# SPDX-License-Identifier: Apache-2.0
"""How a dense model becomes a mixture of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from megatron_ext.errors import combine
from megatron_ext.phrases import as_option

if TYPE_CHECKING:
    from megatron_ext.convert.settings import ModelSettings

__all__ = ["UpcycleConfig"]


@dataclass(frozen=True, kw_only=True)
class UpcycleConfig:
    """How a dense model becomes a mixture of experts."""

    num_experts: int = 8
    """Copies of every MLP."""

    topk: int = 2
    """Copies that every token is given to."""

    granularity: int = 1
    """Slices that every copy is cut into, each of which is an expert: N times as many experts, and N times as many for
    every token."""

    noise_std: float = 0.0
    """Standard deviation of the noise that is added to experts' weights."""

    noise_fraction: float = 1.0
    """Part of the weights that noise is added to, chosen at random (1 for all)."""

    router_init: Literal["normal", "zeros", "mlp"] = "normal"
    """Router's weights: normal with ``--router-std``, zeros, or (mlp) normal with the standard deviation of the layer's
    second MLP weight."""

    router_std: float = 0.02
    """Standard deviation of the router's weights."""

    aux_loss_coeff: float = 1e-3
    """Weight of the loss that balances experts (``--moe-aux-loss-coeff``)."""

    untie_embeddings: bool = False
    """Give the output layer weights of its own, which begin as the embedding's, where the dense model shares them."""

    seed: int = 1234
    """Of the noise and the router."""

    def check(self, dense: ModelSettings) -> None:
        """Check that the dense model can become this mixture.

        Raises:
            UserError: naming what cannot be.
        """
        problems = [
            f"{as_option(name)} {getattr(self, name)}: give a whole number of at least 1"
            for name in ("num_experts", "topk", "granularity")
            if getattr(self, name) < 1
        ]
        if self.topk > self.num_experts:
            problems.append(f"--topk {self.topk}: there are {self.num_experts} copies")
        if self.granularity > 0 and dense.ffn_hidden_size % self.granularity:
            problems.append(f"--granularity {self.granularity} does not divide the MLP's width {dense.ffn_hidden_size}")
        problems += [
            f"{as_option(name)} {getattr(self, name)}: give a finite number of 0 or more"
            for name in ("noise_std", "router_std", "aux_loss_coeff")
            if not 0 <= getattr(self, name) < math.inf
        ]
        if not 0 <= self.noise_fraction <= 1:
            problems.append(f"--noise-fraction {self.noise_fraction}: give a number from 0 to 1")
        if dense.num_experts is not None:
            problems.append(f"the model has experts already ({dense.num_experts})")
        if dense.mtp_num_layers:
            problems.append(
                "the model has layers of multi-token prediction, of which no mixture is made; leave them out with "
                "`convert to-hf --drop-mtp`, and read that with `convert from-hf`"
            )
        if dense.add_bias_linear:
            problems.append("the model's linear layers have biases, and experts here have none")
        if problems:
            raise combine(problems, "convert upcycle")

    def settings(self, dense: ModelSettings) -> ModelSettings:
        """Return the mixture's settings."""
        return replace(
            dense,
            untie_embeddings_and_output_weights=self.untie_embeddings or dense.untie_embeddings_and_output_weights,
            num_experts=self.num_experts * self.granularity,
            moe_ffn_hidden_size=dense.ffn_hidden_size // self.granularity,
            moe_router_topk=self.topk * self.granularity,
            # One expert's weight is 1 in a softmax over those chosen, and its router would never learn.
            moe_router_pre_softmax=self.topk * self.granularity == 1,
            moe_aux_loss_coeff=self.aux_loss_coeff,
        )
