# SPDX-License-Identifier: Apache-2.0
"""No common pseudo-gradient, but the mean of a pair's, a random one in every round (NoLoCo, arXiv 2506.10911)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.outer.places import Where
from megatron_ext.outer.reducers.linear import Linear

__all__ = ["Pairwise"]

_REASON = "pairs have no common anchor, which a server keeps"


@dataclass(frozen=True, kw_only=True)
class Pairwise(Linear):
    """The mean of two workers' pseudo-gradients."""

    name: ClassVar[str] = "pairwise"
    refused_in: ClassVar[Mapping[Where, str]] = {Where.SERVER: _REASON, Where.ASYNCHRONOUS: _REASON}
    in_pairs: ClassVar[bool] = True
