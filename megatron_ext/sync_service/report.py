# SPDX-License-Identifier: Apache-2.0
"""What a peer says of its interval when it commits a contribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["Report"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Beside the values; nothing of it changes them."""

    loss: float | None = None
    """Mean training loss of the interval."""

    steps: int | None = None
    """Steps made since the values that the interval began with."""

    made: int | None = None
    """Steps made in the run by the end of the interval, those that did not count included; the sum of those of the
    intervals that counted, if nothing is said."""

    def as_json(self) -> dict[str, Any]:
        """Return what is known, for the journal; a loss that is not finite as None, which JSON can hold."""
        found: dict[str, Any] = {}
        if self.loss is not None:
            found["loss"] = self.loss if math.isfinite(self.loss) else None
        if self.steps is not None:
            found["steps"] = self.steps
        if self.made is not None:
            found["made"] = self.made
        return found
