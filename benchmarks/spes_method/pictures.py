# SPDX-License-Identifier: Apache-2.0
"""What the studies' pictures share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["figure_of"]


@contextmanager
def figure_of(picture: Path, count: int) -> Iterator[Any]:
    """Give axes side by side, and write them as a PNG in the end.

    Args:
        picture: the file.
        count: of the axes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(11, 4), layout="constrained", squeeze=False)
    yield axes[0]
    for each in axes[0]:
        each.grid(alpha=0.3)
    figure.savefig(picture, dpi=90)
    pyplot.close(figure)
