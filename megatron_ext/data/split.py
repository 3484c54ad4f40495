# SPDX-License-Identifier: Apache-2.0
"""Which documents of a corpus Megatron's --split gives to training, validation and test."""

from __future__ import annotations

import math
import re
from itertools import accumulate, pairwise

from megatron_ext.errors import UserError

__all__ = ["MEGATRONS_SPLIT", "advised_split", "parts_of", "parts_without_documents"]

MEGATRONS_SPLIT = "969,30,1"
"""What Megatron takes where --split is not given."""

_PARTS = ("training", "validation", "test")


def parts_of(count: int, split: str) -> list[tuple[int, int] | None]:
    """Return the first document of each part of a corpus, and the one after its last; None for a part of 0.

    Megatron's own arithmetic, float by float, without the seconds that importing it takes.

    Args:
        count: of documents in the corpus.
        split: Megatron's --split.

    Raises:
        UserError: the split is none.
    """
    # Megatron passes over what is not a number, and divides by the sum.
    try:
        numbers = [float(number) for number in re.findall(r"[.0-9]+", split)]
    except ValueError:
        numbers = []
    # Plain additions in order, which sum() would do with more digits than Megatron does.
    *_, total = accumulate(numbers, initial=0.0)
    if len(numbers) > len(_PARTS) or not 0 < total < math.inf:
        raise UserError(f"--split is '{split}'; give up to three numbers that are not all 0, as in 969,30,1")
    numbers += [0.0] * (len(_PARTS) - len(numbers))
    bounds = accumulate((number / total for number in numbers), initial=0.0)
    return [None if stop <= start else (round(start * count), round(stop * count)) for start, stop in pairwise(bounds)]


def parts_without_documents(count: int, split: str) -> list[str]:
    """Return the names of the parts that a split asks for and leaves empty; Megatron would not return from these.

    Raises:
        UserError: the split is none.
    """
    parts = zip(_PARTS, parts_of(count, split), strict=True)
    return [name for name, part in parts if part is not None and part[0] == part[1]]


def advised_split(count: int) -> str:
    """Return a split of this many documents that has one for validation where there are two."""
    return f"{count - 1},1,0" if count > 1 else "1,0,0"
