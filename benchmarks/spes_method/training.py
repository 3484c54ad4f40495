# SPDX-License-Identifier: Apache-2.0
"""SPES in one process: replicas side by side, masks in place of frozen experts, and rounds that are plain means.

Nothing of megatron_ext is in it, so that it can be held against real peers at a real server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # its usual name
from torch import Tensor

from benchmarks.spes_method.model import Sizes, is_of_experts, losses, replicated

__all__ = ["Adam", "Merging", "Method", "Trained", "block_owners", "everyone", "merged", "train", "validation_loss"]

_VALIDATED_AT_ONCE = 32
"""Sequences."""


@dataclass(frozen=True, kw_only=True)
class Adam:
    """The inner optimizer and its schedule, a cosine after a linear warm-up."""

    rate: float
    """The largest learning rate."""
    least: float
    """The smallest one, at the end."""
    warmup: int
    """Steps; the first one has the rate 0, as in Megatron."""
    steps: int
    """Of the training."""
    betas: tuple[float, float] = (0.9, 0.95)
    decay: float = 0.1
    """Weight decay of what has more than one dimension."""
    clip: float = 1.0
    """Largest gradient norm of a replica, over what it trains."""

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, the first of which is 0."""
        if step <= self.warmup and self.warmup:
            return self.rate * step / self.warmup
        share = (step - self.warmup) / (self.steps - self.warmup)
        return self.least + 0.5 * (math.cos(math.pi * share) + 1.0) * (self.rate - self.least)


@dataclass(frozen=True, kw_only=True)
class Merging:
    """In some rounds every expert takes over a little of those that it resembles most."""

    every: int
    """Steps."""
    alpha: float
    """At the start."""
    until: int
    """Steps after which it is 0."""
    donors: int = 4

    def alpha_after(self, step: int) -> float:
        """Return how much is taken over after this many steps."""
        return 0.0 if step % self.every else self.alpha * (1 - min(step / self.until, 1))


@dataclass(frozen=True, kw_only=True)
class Method:
    """How replicas train together."""

    owners: Tensor
    """bool, (replicas, experts): which ones train an expert."""
    interval: int
    """Steps between two rounds."""
    common_gradients: bool = False
    """Centralized training instead: what is shared takes the mean of all replicas' gradients in every step, and
    an expert that of its owners."""
    merging: Merging | None = None


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of it."""

    losses: list[list[float]]
    """Of every step, by replica."""
    validation: dict[int, float]
    """By steps finished."""
    weights: dict[str, Tensor]
    """Of all replicas."""


def block_owners(replicas: int, experts: int, each: int = 1) -> Tensor:
    """Return owners of blocks of neighbours: of a block a replica, and the `each` - 1 replicas after it."""
    found = torch.zeros(replicas, experts, dtype=torch.bool)
    for expert in range(experts):
        first = expert * replicas // experts
        for place in range(each):
            found[(first + place) % replicas, expert] = True
    return found


def everyone(replicas: int, experts: int) -> Tensor:
    """Return that every replica trains every expert."""
    return torch.ones(replicas, experts, dtype=torch.bool)


def train(
    start: Mapping[str, Tensor],
    sizes: Sizes,
    method: Method,
    adam: Adam,
    batch: Callable[[int], Tensor],
    validation: tuple[int, Tensor] | None = None,
) -> Trained:
    """Train replicas that begin alike.

    Args:
        start: the weights of one.
        sizes: of the model.
        method: how they train together.
        adam: the optimizer of each.
        batch: returns all replicas' tokens at a step, int64, (replicas, sequences, context + 1).
        validation: steps between two validation losses, and its sequences; a whole number of intervals.
    """
    weights = replicated(start, len(method.owners))
    optimizer = _optimizer(weights, start, adam)
    seen, validated = [], {}
    for step in range(adam.steps):
        for group in optimizer.param_groups:
            group["lr"] = adam.rate_at(step)
        loss, balance = losses(weights, batch(step), sizes)
        optimizer.zero_grad()
        (loss + balance).sum().backward()
        if method.common_gradients:
            _share_gradients(weights, method.owners)
        else:
            _mask_gradients(weights, method.owners)
        _clip(weights, adam.clip)
        _step(optimizer, weights, None if method.common_gradients else method.owners)
        seen.append(loss.tolist())
        if (step + 1) % method.interval == 0 and not method.common_gradients:
            _round(weights, method, step + 1)
        if validation is not None and (step + 1) % validation[0] == 0:
            validated[step + 1] = validation_loss(weights, validation[1], sizes)
    return Trained(losses=seen, validation=validated, weights=weights)


@torch.no_grad()
def validation_loss(weights: Mapping[str, Tensor], tokens: Tensor, sizes: Sizes) -> float:
    """Return the first replica's loss per token of some sequences, (sequences, context + 1)."""
    first = {name: value[:1] for name, value in weights.items()}
    parts = tokens.split(_VALIDATED_AT_ONCE)
    return sum(float(losses(first, part[None], sizes)[0]) * len(part) for part in parts) / len(tokens)


def merged(experts: Mapping[str, Tensor], alpha: float, donors: int) -> dict[str, Tensor]:
    """Return a layer's experts after merging: (1 - alpha) of each, and alpha of the mean of those most like it.

    Args:
        experts: "fc1" (experts, 2 * width, hidden), whose first half is compared by its cosine, and "fc2".
        alpha: how much is taken over.
        donors: how many are most like it; all others where there are fewer.
    """
    gates = F.normalize(experts["fc1"].chunk(2, dim=1)[0].flatten(1).double(), dim=1)
    alike = (gates @ gates.T).fill_diagonal_(-torch.inf).topk(min(donors, len(gates) - 1)).indices
    return {name: (1 - alpha) * value + alpha * value[alike].mean(dim=1) for name, value in experts.items()}


def _optimizer(weights: Mapping[str, Tensor], start: Mapping[str, Tensor], adam: Adam) -> torch.optim.Optimizer:
    vectors = [weights[name] for name, value in start.items() if value.dim() == 1]
    others = [weights[name] for name, value in start.items() if value.dim() > 1]
    groups = [{"params": others, "weight_decay": adam.decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=adam.betas, eps=1e-8, fused=True)


def _of(owners: Tensor, value: Tensor) -> Tensor:
    """Return the owners in the form of a tensor of experts."""
    return owners.view(*owners.shape, *[1] * (value.dim() - 2))


def _gradient(value: Tensor) -> Tensor:
    assert value.grad is not None
    return value.grad


def _mean_of_owners(value: Tensor, owners: Tensor) -> Tensor:
    """Return the mean over an expert's owners, (1, experts, ...)."""
    mask = _of(owners, value)
    return (value * mask).sum(dim=0, keepdim=True) / mask.sum(dim=0, keepdim=True)


def _mask_gradients(weights: Mapping[str, Tensor], owners: Tensor) -> None:
    for name, value in weights.items():
        if is_of_experts(name):
            _gradient(value).mul_(_of(owners, value))


def _share_gradients(weights: Mapping[str, Tensor], owners: Tensor) -> None:
    for name, value in weights.items():
        gradient = _gradient(value)
        gradient.copy_(_mean_of_owners(gradient, owners) if is_of_experts(name) else gradient.mean(0, keepdim=True))


def _clip(weights: Mapping[str, Tensor], most: float) -> None:
    """Clip every replica's gradients to a norm."""
    gradients = [_gradient(value) for value in weights.values()]
    norm = torch.stack([gradient.flatten(1).square().sum(dim=1) for gradient in gradients]).sum(dim=0).sqrt()
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.view(-1, *[1] * (gradient.dim() - 1)))


@torch.no_grad()
def _step(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], owners: Tensor | None) -> None:
    """Make a step that leaves what a replica does not own as it is, weight decay too."""
    if owners is None:
        optimizer.step()
        return
    before = {name: value.clone() for name, value in weights.items() if is_of_experts(name)}
    optimizer.step()
    for name, value in before.items():
        weights[name].copy_(torch.where(_of(owners, value), weights[name], value))


@torch.no_grad()
def _round(weights: Mapping[str, Tensor], method: Method, step: int) -> None:
    """Give all replicas the mean of what is shared, and of every expert that of its owners."""
    for name, value in weights.items():
        value.copy_(_mean_of_owners(value, method.owners) if is_of_experts(name) else value.mean(0, keepdim=True))
    alpha = 0.0 if method.merging is None else method.merging.alpha_after(step)
    if method.merging is None or alpha == 0.0:
        return
    for layer in {name.partition(".")[0] for name in weights if is_of_experts(name)}:
        experts = {name: weights[f"{layer}.{name}"] for name in ("fc1", "fc2")}
        taken = merged({name: value[0] for name, value in experts.items()}, alpha, method.merging.donors)
        for name, value in experts.items():
            value.copy_(taken[name])
