# SPDX-License-Identifier: Apache-2.0
"""From the ranks' records to summary.json, a table and a picture."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BACKEND_PATCHES = ("cpu", "norms", "repairs", "wheel")
OPTION_PATCHES = ("arguments",)


@dataclass(kw_only=True)
class Run:
    """The records of one run's ranks, as recorder.py wrote them."""

    ranks: list[dict[str, Any]]
    """One record per rank."""

    training: list[tuple[int, float]] = field(init=False)
    """(iterations finished, training loss): the mean over the global batch."""

    validation: list[tuple[int, float]] = field(init=False)
    """(iterations finished, validation loss)."""

    crossing_bytes: list[int] = field(init=False)
    """Bytes given to collectives between workers, for every iteration, summed over ranks."""

    def __post_init__(self) -> None:
        """Combine the ranks."""
        first = self.ranks[0]["first_iteration"] + 1
        # Every worker has the same number of tokens, so the mean over ranks is that over the global batch.
        by_iteration = zip(*(rank["losses"] for rank in self.ranks), strict=True)
        self.training = [(first + index, _mean(losses)) for index, losses in enumerate(by_iteration)]
        self.validation = [(int(at), float(loss)) for at, loss in self.ranks[-1]["evaluations"]]
        self.crossing_bytes = [sum(each) for each in zip(*(rank["crossing_bytes"] for rank in self.ranks), strict=True)]

    @classmethod
    def read(cls, folder: Path, processes: int) -> "Run":
        """Read the records of `processes` ranks."""
        files = [folder / f"rank{rank}.json" for rank in range(processes)]
        return cls(ranks=[json.loads(file.read_text(encoding="utf-8")) for file in files])

    def ms_per_iteration(self) -> float:
        """Return the mean time of an iteration without evaluations and checkpoints, the first one left out.

        Between two such interruptions every rank has its own clock, and the slowest one counts.
        """
        seconds, iterations = 0.0, 0
        for number, parts in enumerate(zip(*(rank["segments"] for rank in self.ranks), strict=True)):
            measured = [part[1:] if number == 0 else part for part in parts]
            seconds += max(sum(part) for part in measured)
            iterations += len(measured[0])
        return 1000 * seconds / iterations

    def final_training_loss(self, iterations: int) -> float:
        """Return the mean over the last `iterations` iterations."""
        return _mean([loss for _, loss in self.training[-iterations:]])

    def patches(self) -> dict[str, int]:
        """Return how many patches were in force, by what they are for."""
        kinds = Counter(name.partition("/")[0] for name in self.ranks[0]["patches"])
        backend = sum(kinds[kind] for kind in BACKEND_PATCHES)
        options = sum(kinds[kind] for kind in OPTION_PATCHES)
        return {"backend": backend, "options": options, "training": kinds.total() - backend - options}

    def summary(self, last: int, warmup: int) -> dict[str, Any]:
        """Return what summary.json says about the run.

        Args:
            last: iterations at the end that make up the final training loss.
            warmup: iterations at the start that are synchronous in both runs.
        """
        later = self.crossing_bytes[warmup:]
        return {
            "final_train_loss": self.final_training_loss(last),
            "final_validation_loss": self.validation[-1][1],
            "ms_per_iteration": self.ms_per_iteration(),
            "cross_worker_bytes_per_iteration": sum(self.crossing_bytes) / len(self.crossing_bytes),
            "cross_worker_bytes_per_iteration_after_warmup": sum(later) / len(later),
            "iterations": len(self.crossing_bytes),
            "iterations_with_cross_worker_traffic": sum(count > 0 for count in self.crossing_bytes),
            "validation_losses": self.validation,
            "patches": self.patches(),
        }


def resumed_differences(full: Run, resumed: Run) -> list[str]:
    """Return how the resumed run differs from the end of the uninterrupted one; nothing = no bit differs."""
    found = []
    for before, after in zip(full.ranks, resumed.ranks, strict=True):
        where = f"rank {before['rank']}: "
        start = after["first_iteration"]
        expected, got = before["losses"][start - before["first_iteration"] :], after["losses"]
        if not got or len(got) != len(expected):
            found.append(f"{where}{len(got)} iterations instead of {len(expected)}")
        for index, (one, other) in enumerate(zip(expected, got, strict=False)):
            if one != other:
                found.append(f"{where}training loss of iteration {start + index + 1}: {one!r} and {other!r}")
                break
        evaluations = [entry for entry in before["evaluations"] if entry[0] > start]
        if evaluations != after["evaluations"]:
            found.append(f"{where}validation losses {evaluations} and {after['evaluations']}")
        for name in ("weights_digest", "optimizer_digest"):
            if not before[name] or before[name] != after[name]:
                found.append(f"{where}{name.replace('_', ' ')} {before[name]} and {after[name]}")
    return found


def table(summary: dict[str, Any], last: int) -> str:
    """Return the results as text."""
    runs = [summary["synchronous"], summary["local_sgd"]]

    def row(label: str, key: str, form: str) -> str:
        return f"  {label:<44}" + "".join(f"{run[key]:>18{form}}" for run in runs)

    lines = [
        f"  {'':<44}{'synchronous':>18}{'local SGD':>18}",
        row(f"training loss, mean of the last {last} iterations", "final_train_loss", ".4f"),
        row("validation loss at the end", "final_validation_loss", ".4f"),
        row("milliseconds per iteration", "ms_per_iteration", ".1f"),
        row("bytes between workers per iteration", "cross_worker_bytes_per_iteration", ",.0f"),
        row("the same after the warm-up", "cross_worker_bytes_per_iteration_after_warmup", ",.0f"),
        row("iterations with traffic between workers", "iterations_with_cross_worker_traffic", ""),
        "",
        f"  bytes between workers, local SGD / synchronous: {summary['cross_worker_bytes_ratio']:.4f}",
        "  resumed from the middle of an interval:         "
        + ("equal, bit for bit" if summary["resume_bit_exact"] else "DIFFERENT"),
    ]
    return "\n".join(lines)


def describe_patches(summary: dict[str, Any]) -> str:
    """Return in words what was patched in each run."""
    lines = ["Patches in force (in both runs, the instrument of this quickstart comes on top)"]
    for label, key in (("synchronous", "synchronous"), ("local SGD", "local_sgd")):
        count = summary[key]["patches"]
        lines.append(
            f"  {label:<12} {count['backend']:>3} to run on this machine, {count['options']} to read our "
            f"options, {count['training']} that take part in training"
        )
    return "\n".join(lines)


def plot(synchronous: Run, local_sgd: Run, file: Path) -> None:
    """Draw both runs' losses, and what they sent between workers, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, (losses, traffic) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    curves = ((synchronous, "synchronous", "tab:blue"), (local_sgd, "local SGD", "tab:orange"))
    for run, label, color in curves:
        iterations = [at for at, _ in run.training]
        losses.plot(iterations, [loss for _, loss in run.training], color=color, alpha=0.5, linewidth=1)
        losses.plot(*zip(*run.validation, strict=True), color=color, marker="o", label=f"{label}, validation")
        total, sent = 0, []
        for count in run.crossing_bytes:
            total += count
            sent.append(total / 1e6)
        traffic.plot(iterations, sent, color=color, label=label)
    losses.plot([], [], color="grey", alpha=0.5, linewidth=1, label="training (thin)")
    losses.set(xlabel="iteration", ylabel="loss (nats per byte of text)", title="Loss")
    losses.legend()
    traffic.set(xlabel="iteration", ylabel="MB", title="Sent between the workers, in total")
    traffic.legend()
    for axes in (losses, traffic):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known)
