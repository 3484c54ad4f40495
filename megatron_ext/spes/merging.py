# SPDX-License-Identifier: Apache-2.0
"""Expert merging (SPES, arXiv 2602.11543): every expert takes over a little of the experts that it resembles most.

In every layer by itself, with W_i all weights of expert i and N(i) the `topk` experts whose w1 (the gate) has the
largest cosine with that of i:

    W_i <- (1 - alpha) W_i + alpha mean_{j in N(i)} W_j

All experts are merged from one state: no expert takes over what was merged already, and the order of the tensors plays
no part. Arithmetic is in fp32, cosines in fp64. Tensors are read and written block by block, so that memory
holds E x E cosines and a few MiB, whatever the size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from megatron_ext.spes.experts import ExpertLayer, expert_layers

__all__ = ["Read", "Write", "donors_of", "merge_experts", "merge_layer", "similarities"]

Read = Callable[[str, int, int], torch.Tensor]
"""Returns `count` elements of a tensor from the element `offset` on, fp32, 1-D, given (name, offset, count)."""

Write = Callable[[str, int, torch.Tensor], None]
"""Replaces elements of a tensor, given (name, offset, values), the values being fp32, 1-D."""

_BLOCK_BYTES = 4 << 20
"""Of the elements of all experts that are in memory at once."""


def similarities(layer: ExpertLayer, read: Read) -> torch.Tensor:
    """Return how much the experts of a layer resemble each other.

    Args:
        layer: the experts.
        read: gives their values.

    Returns:
        Cosines of the gates, fp64, (experts, experts). -inf for an expert with itself, and for experts of which a value
        is non-finite. 0 for a gate that is all zeros.
    """
    gram = torch.zeros(layer.experts, layer.experts, dtype=torch.float64)
    is_finite = torch.ones(layer.experts, dtype=torch.bool)
    for leaf, names in layer.tensors.items():
        compared = layer.compared if names is layer.first else 0
        for offset, count in _blocks(layer, layer.sizes[leaf]):
            block = _read(read, names, offset, count)
            is_finite &= block.isfinite().all(dim=1)
            part = block[:, : max(0, compared - offset)].double()
            gram += part @ part.T
    norms = gram.diagonal().sqrt()
    cosines = gram / (norms[:, None] * norms).clamp(min=torch.finfo(torch.float64).tiny)
    non_finite = ~is_finite[:, None] | ~is_finite
    return cosines.masked_fill(non_finite, -torch.inf).fill_diagonal_(-torch.inf)


def donors_of(cosines: torch.Tensor, topk: int, *, like_official: bool = False) -> list[tuple[int, ...]]:
    """Return from whom every expert takes over.

    Args:
        cosines: as `similarities` returns them.
        topk: how many; all others where there are fewer. Of experts that are equally alike the first ones.
        like_official: where there are no more experts than `topk`, count the expert itself as well.

    Returns:
        The experts, ascending; none for an expert with non-finite values.
    """
    found: list[tuple[int, ...]] = []
    for expert, row in enumerate(cosines):
        order = torch.sort(row, descending=True, stable=True).indices.tolist()
        chosen = [other for other in order[:topk] if row[other] > -torch.inf]
        if like_official and len(cosines) <= topk and chosen:
            chosen.append(expert)
        found.append(tuple(sorted(chosen)))
    return found


def merge_layer(
    layer: ExpertLayer, *, alpha: float, topk: int, read: Read, write: Write, like_official: bool = False
) -> None:
    """Merge the experts of a layer.

    Experts with a non-finite value are taken over by no other expert, and stay unchanged.

    Args:
        layer: the experts.
        alpha: how much they take over.
        topk: from how many.
        read: gives their values.
        write: takes the new ones. What it has taken, `read` may give from then on.
        like_official: see `donors_of`.
    """
    donors = donors_of(similarities(layer, read), topk, like_official=like_official)
    for leaf, names in layer.tensors.items():
        for offset, count in _blocks(layer, layer.sizes[leaf]):
            block = _read(read, names, offset, count)
            for name, own, others in zip(names, block, donors, strict=True):
                if others:
                    # Added one after the other: a sum by columns may depend on the number of threads.
                    total = block[others[0]].clone()
                    for other in others[1:]:
                        total += block[other]
                    write(name, offset, own * (1 - alpha) + total * (alpha / len(others)))


def merge_experts(
    values: Mapping[str, torch.Tensor], *, alpha: float, topk: int = 4, like_official: bool = False
) -> dict[str, torch.Tensor]:
    """Return a model after merging the experts of every layer.

    Args:
        values: the tensors by their global names, in any order, of any floating-point type.
        alpha: how much experts take over.
        topk: from how many.
        like_official: see `donors_of`.

    Returns:
        The tensors in the same order and of the same types; those that belong to no expert are the same objects.

    Raises:
        UserError: the experts of a layer do not have the same tensors.
    """
    merged = dict(values)

    def read(name: str, offset: int, count: int) -> torch.Tensor:
        return values[name].reshape(-1)[offset : offset + count].float()

    def write(name: str, offset: int, block: torch.Tensor) -> None:
        if merged[name] is values[name]:
            merged[name] = values[name].clone(memory_format=torch.contiguous_format)
        merged[name].view(-1)[offset : offset + block.numel()] = block.to(merged[name].dtype)

    for layer in expert_layers({name: tuple(value.shape) for name, value in values.items()}):
        merge_layer(layer, alpha=alpha, topk=topk, read=read, write=write, like_official=like_official)
    return merged


def _blocks(layer: ExpertLayer, numel: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, count) of the blocks in which tensors of this many elements are processed."""
    step = max(1, _BLOCK_BYTES // 4 // layer.experts)
    for offset in range(0, numel, step):
        yield offset, min(step, numel - offset)


def _read(read: Read, names: tuple[str, ...], offset: int, count: int) -> torch.Tensor:
    """Return the same elements of the tensors of all experts, (experts, count)."""
    block = torch.empty(len(names), count)
    for row, name in zip(block, names, strict=True):
        row.copy_(read(name, offset, count))
    return block
