# SPDX-License-Identifier: Apache-2.0
"""What the studies' pictures share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["two_axes"]


@contextmanager
def two_axes(file: Path) -> Iterator[Any]:
    """Give two axes side by side, and write them as a PNG in the end.

    Args:
        file: the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    yield both
    for axes in both:
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=90)
    pyplot.close(figure)
