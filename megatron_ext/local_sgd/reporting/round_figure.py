# SPDX-License-Identifier: Apache-2.0
"""The rounds of a run as a picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.local_sgd.reporting.round_log import as_number, mean_weights, sending_seconds

__all__ = ["draw_rounds"]


def draw_rounds(rounds: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw norms, weights, cosine, exclusions, times and bytes of rounds over their iterations, into a PNG.

    Args:
        rounds: what `read_rounds` returned, at least one.
        file: replaced.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    at = [entry["iteration"] for entry in rounds]
    figure, panels = pyplot.subplots(2, 3, figsize=(17, 7), layout="constrained", sharex=True)
    norms, weights, cosine, rejected, seconds, sent = panels.flat

    workers = max(len(entry["worker_norms"]) for entry in rounds)
    for worker in range(workers):
        own = [_finite(entry["worker_norms"], worker) for entry in rounds]
        norms.plot(at, own, linewidth=1, alpha=0.6, label=f"worker {worker}" if workers <= 8 else None)
    common = [_finite([entry["pseudo_gradient_norm"]], 0) for entry in rounds]
    norms.plot(at, common, color="black", marker=".", label="together")
    norms.set(title="Norm of the pseudo-gradient", yscale="log")
    norms.legend(ncols=2)

    for worker in range(workers):
        weights.plot(at, [_weight(entry, worker) for entry in rounds], marker=".", linewidth=1)
    weights.set(title="Weight of each worker, mean over units", ylim=(0, None))

    known = [(entry["iteration"], entry["cosine"]) for entry in rounds if entry["cosine"] is not None]
    cosine.plot([place for place, _ in known], [value for _, value in known], marker=".")
    cosine.axhline(0, color="grey", linewidth=1)
    cosine.set(title="Cosine to the outer momentum", ylim=(-1.05, 1.05))

    bottom = [0] * len(rounds)
    for worker in range(workers):
        units = [sum(worker in left_out for left_out in entry["rejected"].values()) for entry in rounds]
        if any(units):
            rejected.bar(at, units, bottom=bottom, width=_bar_width(at), color=f"C{worker}", label=f"worker {worker}")
            bottom = [before + more for before, more in zip(bottom, units, strict=True)]
    skipped = [len(entry.get("skipped_units", ())) for entry in rounds]
    if any(skipped):
        rejected.plot(at, skipped, "kx", label="all (back to the anchor)")
    rejected.set(title="Units that a worker was left out of", xlabel="iteration")
    rejected.yaxis.set_major_locator(MaxNLocator(integer=True))
    if any(bottom):
        rejected.legend(ncols=2)
    else:
        rejected.set(ylim=(0, 1))

    waiting = [entry["waiting_seconds"] for entry in rounds]
    applying = [entry["applying_seconds"] for entry in rounds]
    sending = [sending_seconds(entry) for entry in rounds]
    seconds.stackplot(at, waiting, sending, applying, labels=["waiting", "sending", "applying"])
    seconds.set(title="Seconds of a round", xlabel="iteration", ylim=(0, None))
    seconds.legend()

    megabytes = [entry["bytes_sent"] / 1e6 for entry in rounds]
    sent.bar(at, megabytes, width=_bar_width(at))
    sent.set(title="MB that a rank sent", xlabel="iteration")

    for panel in panels.flat:
        panel.grid(alpha=0.3)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _weight(entry: dict[str, Any], worker: int) -> float:
    """Return a worker's weight in a round; a gap where it was not among them."""
    count = len(entry["worker_norms"])
    # Without a penalty all count alike.
    weights = mean_weights(entry) or [1 / count] * count
    return weights[worker] if worker < len(weights) else math.nan


def _finite(values: Sequence[float | None], index: int) -> float:
    """Return a value to draw; a gap where there is none, or none that can be drawn."""
    value = as_number(values[index]) if index < len(values) else math.nan
    return value if math.isfinite(value) and value > 0 else math.nan


def _bar_width(at: Sequence[int]) -> float:
    """Return the width of a bar among others at these places."""
    return 0.8 * min((later - earlier for earlier, later in itertools.pairwise(at)), default=1)
