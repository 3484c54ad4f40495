# SPDX-License-Identifier: Apache-2.0
"""Patterns of hybrid models (``--hybrid-layer-pattern``).

A letter stands for a layer, a bar separates pipeline stages, and behind each slash is what one layer of multi-token
prediction is made of.
"""

from __future__ import annotations

from megatron_ext.params.layer_parts import LayerPart
from megatron_ext.params.tensors import ParamsError

KINDS: dict[str, LayerPart] = {
    "M": "state_space",
    "*": "attention",
    "+": "attention",
    "D": "sparse_attention",
    "G": "delta_net",
    "-": "mlp",
    "E": "experts",
}
"""What Megatron's letters stand for; ``+`` is multi-latent attention, which the model's other options tell too."""


def kinds_of_pattern(pattern: str) -> tuple[tuple[LayerPart, ...], tuple[LayerPart, ...]]:
    """Return what each layer of the decoder is, and what each layer of multi-token prediction is made of.

    Raises:
        ParamsError: the pattern has layers that the parameter view does not know.
    """
    for letter in pattern:
        if letter not in KINDS and letter not in "|/":
            raise ParamsError(
                f"--hybrid-layer-pattern {pattern}: layers of the kind {letter} are not known here; they can be "
                + ", ".join(KINDS)
            )
    # All layers of multi-token prediction are alike.
    predicting = pattern.partition("/")[2].partition("/")[0]
    return (
        tuple(KINDS[letter] for stage in stages_of_pattern(pattern) for letter in stage),
        tuple(KINDS[letter] for letter in predicting),
    )


def stages_of_pattern(pattern: str) -> list[str]:
    """Return the letters of each model chunk in the model's order; all of them where the pattern has no bars."""
    return pattern.partition("/")[0].split("|")
