# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts GPT in plain PyTorch, for several replicas at once: Megatron's arithmetic, none of its code.

Every tensor has the replicas as its first dimension, and no operation mixes two of them. RMS norms, rotary positions,
gated experts without biases, an output layer that is the embedding, softmax over the chosen experts alone, and
the load-balancing loss of Switch Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # its usual name
from torch import Tensor

__all__ = ["Sizes", "initial", "is_of_experts", "losses", "of_megatron", "replicated"]

_EPSILON = 1e-5
_ROTARY_BASE = 10000.0
_DEVIATION = 0.02


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a model."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    experts: int = 8
    """Of a layer."""
    chosen: int = 2
    """Experts of a token."""
    width: int = 32
    """Of an expert."""
    context: int = 64
    """Tokens of a sequence."""
    vocabulary: int = 258
    balance: float = 1e-2
    """Coefficient of the load-balancing loss."""


def is_of_experts(name: str) -> bool:
    """Return whether a tensor is of experts, shape (replicas, experts, ...); the others are shared."""
    return name.endswith((".fc1", ".fc2"))


def initial(sizes: Sizes, seed: int) -> dict[str, Tensor]:
    """Return random weights, without the replicas' dimension: normal, those that add to the stream smaller."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=random) * (_DEVIATION * scale)

    deep = (2 * sizes.layers) ** -0.5
    hidden, width, experts = sizes.hidden, sizes.width, sizes.experts
    found = {"embedding": normal(sizes.vocabulary, hidden), "norm": torch.ones(hidden)}
    for layer in range(sizes.layers):
        found |= {
            f"{layer}.norm1": torch.ones(hidden),
            f"{layer}.qkv": normal(3 * hidden, hidden),
            f"{layer}.proj": normal(hidden, hidden, scale=deep),
            f"{layer}.norm2": torch.ones(hidden),
            f"{layer}.router": normal(experts, hidden),
            f"{layer}.fc1": normal(experts, 2 * width, hidden),
            f"{layer}.fc2": normal(experts, hidden, width, scale=deep),
        }
    return found


def of_megatron(state: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Return the weights of a Megatron model, by the names of its parameters, as `initial` does.

    Raises:
        KeyError: the model has a parameter that this one does not know.
    """
    left = {name: value.detach().clone().float() for name, value in state.items()}
    found = {
        "embedding": left.pop("embedding.word_embeddings.weight"),
        "norm": left.pop("decoder.final_layernorm.weight"),
    }
    for layer in range(sizes.layers):
        at = f"decoder.layers.{layer}"
        for name, there in (
            ("norm1", "input_layernorm"),
            ("qkv", "self_attention.linear_qkv"),
            ("proj", "self_attention.linear_proj"),
            ("norm2", "pre_mlp_layernorm"),
            ("router", "mlp.router"),
        ):
            found[f"{layer}.{name}"] = left.pop(f"{at}.{there}.weight")
        for name in ("fc1", "fc2"):
            each = [
                left.pop(f"{at}.mlp.experts.local_experts.{expert}.linear_{name}.weight")
                for expert in range(sizes.experts)
            ]
            found[f"{layer}.{name}"] = torch.stack(each)
    if left:
        raise KeyError(f"not known here: {sorted(left)}")
    return found


def replicated(weights: Mapping[str, Tensor], replicas: int) -> dict[str, Tensor]:
    """Return equal replicas that can be trained."""
    return {name: torch.stack([value] * replicas).requires_grad_() for name, value in weights.items()}


def losses(weights: Mapping[str, Tensor], tokens: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Return every replica's loss per token, and its load-balancing loss times the coefficient, both (replicas,).

    Args:
        weights: of all replicas.
        tokens: int64, (replicas, sequences, context + 1).
        sizes: of the model.
    """
    replicas, sequences, _ = tokens.shape
    read, wanted = tokens[..., :-1], tokens[..., 1:]
    first = torch.arange(replicas).view(-1, 1, 1) * sizes.vocabulary
    stream = F.embedding(read + first, weights["embedding"].flatten(0, 1)).flatten(1, 2)
    balance = torch.zeros(replicas)
    for layer in range(sizes.layers):
        at = {name.partition(".")[2]: value for name, value in weights.items() if name.startswith(f"{layer}.")}
        stream = stream + _attention(at, _normed(stream, at["norm1"]), sequences, sizes)
        mixed, unbalanced = _mixture(at, _normed(stream, at["norm2"]), sizes)
        stream, balance = stream + mixed, balance + unbalanced
    logits = _linear(_normed(stream, weights["norm"]), weights["embedding"])
    each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    return each.view(replicas, -1).mean(dim=1), balance


def _linear(values: Tensor, weight: Tensor) -> Tensor:
    return values @ weight.transpose(-1, -2)


def _normed(values: Tensor, scale: Tensor) -> Tensor:
    return F.rms_norm(values, values.shape[-1:], eps=_EPSILON) * scale[:, None]


def _attention(at: Mapping[str, Tensor], values: Tensor, sequences: int, sizes: Sizes) -> Tensor:
    replicas, context, size = len(values), values.shape[1] // sequences, sizes.hidden // sizes.heads
    # A head's query, key and value are neighbours.
    parts = _linear(values, at["qkv"]).view(replicas * sequences, context, sizes.heads, 3, size).permute(3, 0, 2, 1, 4)
    query, key, value = parts
    cosine, sine = _positions(context, size)
    query, key = (part * cosine + _turned(part) * sine for part in (query, key))
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return _linear(mixed.transpose(1, 2).reshape(values.shape), at["proj"])


def _positions(context: int, size: int) -> tuple[Tensor, Tensor]:
    frequencies = 1.0 / _ROTARY_BASE ** (torch.arange(0, size, 2).float() / size)
    angles = torch.outer(torch.arange(context).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _turned(values: Tensor) -> Tensor:
    first, second = values.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _mixture(at: Mapping[str, Tensor], values: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Return the experts' part of the stream, and the load-balancing loss times its coefficient."""
    replicas, tokens, _ = values.shape
    scores = _linear(values, at["router"])
    best = scores.topk(sizes.chosen, dim=-1)
    takes = torch.zeros_like(scores).scatter(-1, best.indices, 1.0)
    counts = takes.sum(dim=1)
    means = scores.softmax(dim=-1).sum(dim=1)
    balance = (means * counts).sum(dim=1) * (sizes.balance * sizes.experts / (sizes.chosen * tokens * tokens))

    # Every expert of every replica has as many rows as the one with the most tokens.
    rows = int(counts.max())
    places = (takes.cumsum(dim=1) - 1).gather(-1, best.indices).long() + best.indices * rows
    places = (places + torch.arange(replicas).view(-1, 1, 1) * (sizes.experts * rows)).flatten()
    given = values.new_zeros(replicas * sizes.experts * rows, sizes.hidden)
    given = given.index_copy(0, places, values.flatten(0, 1).repeat_interleave(sizes.chosen, dim=0))
    gate, up = _linear(given.view(replicas, sizes.experts, rows, -1), at["fc1"]).chunk(2, dim=-1)
    found = _linear(F.silu(gate) * up, at["fc2"]).flatten(0, 2)[places].view(replicas, tokens, sizes.chosen, -1)
    return (found * best.values.softmax(dim=-1)[..., None]).sum(dim=2), balance
