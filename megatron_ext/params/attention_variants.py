# SPDX-License-Identifier: Apache-2.0
"""Attention of other kinds in some layers of a GPT: Gated DeltaNet, and the indexer of DeepSeek's sparse attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.options.asked import attention_variant
from megatron_ext.params.layer_parts import LayerPart
from megatron_ext.params.tensors import ParamsError, require_sizes


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Sizes of Gated DeltaNet (Yang et al., 2024), a linear attention that stands in place of softmax attention."""

    layers: tuple[bool, ...] = ()
    """Which layers of a GPT have it (``--linear-attention-freq``); empty in a hybrid model, whose pattern tells."""

    key_heads: int
    """Heads of queries and keys (``--linear-num-key-heads``)."""

    value_heads: int
    """Heads of values, and of their gates (``--linear-num-value-heads``)."""

    key_head_dim: int
    """Channels of a head's query and of its key (``--linear-key-head-dim``)."""

    value_head_dim: int
    """Channels of a head's value (``--linear-value-head-dim``)."""

    conv_width: int = 4
    """Positions that the causal convolution sees (``--linear-conv-kernel-dim``)."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be."""
        sizes = ("key_heads", "value_heads", "key_head_dim", "value_head_dim", "conv_width")
        require_sizes("Gated DeltaNet", self, sizes)

    @property
    def inner_size(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_head_dim

    @property
    def projected(self) -> dict[str, int]:
        """Rows of the input projection by name: queries, keys, values, their gate (z), and two numbers of each head."""
        keys = self.key_heads * self.key_head_dim
        per_head = {"beta": self.value_heads, "alpha": self.value_heads}
        return {"query": keys, "key": keys, "value": self.inner_size, "z": self.inner_size, **per_head}

    @property
    def convolved(self) -> dict[str, int]:
        """Channels of the convolution by name: those of the input projection that it sees."""
        return {name: size for name, size in self.projected.items() if name in ("query", "key", "value")}


@dataclass(frozen=True, kw_only=True)
class SparseIndexer:
    """Sizes of what chooses the keys of each query in DeepSeek's sparse attention; every rank has all of it."""

    heads: int
    """Heads of its own (``--dsa-indexer-n-heads``)."""

    head_dim: int
    """Channels of each (``--dsa-indexer-head-dim``)."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be."""
        require_sizes("sparse attention", self, ("heads", "head_dim"))


def delta_net_of(asked: Any, kinds: Sequence[LayerPart] = ()) -> DeltaNet | None:
    """Return the sizes of Gated DeltaNet; None where no layer has it.

    Args:
        asked: the model's config, or Megatron's validated arguments.
        kinds: of the layers of a hybrid model; none of a GPT, whose variant of attention tells.
    """
    if attention_variant(asked) != "gated_delta_net" and "delta_net" not in kinds:
        return None
    return DeltaNet(
        layers=() if kinds else _delta_net_layers(asked),
        key_heads=asked.linear_num_key_heads,
        value_heads=asked.linear_num_value_heads,
        key_head_dim=asked.linear_key_head_dim,
        value_head_dim=asked.linear_value_head_dim,
        conv_width=asked.linear_conv_kernel_dim,
    )


def sparse_indexer_of(asked: Any) -> SparseIndexer | None:
    """Return the sizes of sparse attention's indexer; None without it. See `delta_net_of`."""
    if attention_variant(asked) != "dsa":
        return None
    return SparseIndexer(heads=asked.dsa_indexer_n_heads, head_dim=asked.dsa_indexer_head_dim)


def _delta_net_layers(asked: Any) -> tuple[bool, ...]:
    # A number says how often there is a layer of softmax attention.
    frequency = asked.linear_attention_freq
    if frequency is None or frequency == 0:
        raise ParamsError(f"Gated DeltaNet: linear_attention_freq is {frequency}; give 1 or more")
    if isinstance(frequency, int):
        return tuple(bool((layer + 1) % frequency) for layer in range(asked.num_layers))
    return tuple(bool(flag) for flag in frequency)
