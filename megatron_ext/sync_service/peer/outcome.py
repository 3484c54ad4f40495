# SPDX-License-Identifier: Apache-2.0
"""What a peer gets of a round."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["RoundOutcome"]


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """What a round gave."""

    number: int
    """The round to continue from: the one that was asked for, or a later one."""

    values: dict[str, torch.Tensor]
    """Its values: of every tensor by name, or of this process's parts by their keys."""

    contributed: bool
    """Whether this peer's contribution counted in the round it was made for."""

    contributors: tuple[str, ...]
    """Who counted in it; empty when that is long ago."""

    message: str
    """Why this peer's contribution did not count."""

    excluded: dict[str, str]
    """Units in which the server's guards have left it out although it counted in others, with the reasons."""

    sent: int
    """Bytes of values, in the codec, that all processes of this peer have sent; the frames' heads do not count."""

    received: int
    """Bytes of values that they have received."""
