# SPDX-License-Identifier: Apache-2.0
"""Which place of a run has other training data than all others: it may be a peer that began with the wrong files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

__all__ = ["the_differing"]


def the_differing(data: Mapping[int, str]) -> int | None:
    """Return the place whose data differ from those of all others, which agree.

    Of two places nobody can say which one differs, and sites that have data of their own each agree in nothing.

    Args:
        data: of every place of which they are known.

    Returns:
        The place; None where there is none.
    """
    counts = Counter(data.values())
    if len(data) < 3 or len(counts) != 2 or 1 not in counts.values():
        return None
    return next(place for place, own in data.items() if counts[own] == 1)
