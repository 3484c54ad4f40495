# SPDX-License-Identifier: Apache-2.0
"""What the SPES quickstart has seen: read from logs and from the server's journal, then summed up."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from megatron_ext.spes import Ownership, training_bytes
from megatron_ext.sync_service.protocol.catalog import Catalog

__all__ = ["Peer", "Rounds", "plot", "summarize", "table"]

_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ .*lm loss: ([\d.E+-]+)")
_ROUND = re.compile(r"sync round: (\d+) \| peers: \d+/\d+ \| sync MB up: ([\d.]+) \| down: ([\d.]+)")
_VALIDATION = re.compile(r"validation loss at iteration (\d+).*lm loss value: ([\d.E+-]+)")
_MEMORY = re.compile(r"spes: this rank has (\d+) bytes of gradients and (\d+) bytes of optimizer states")


@dataclass(kw_only=True)
class Peer:
    """A peer, as its log tells."""

    name: str
    losses: dict[int, float] = field(default_factory=dict)
    """By iteration; of what was done twice the second."""

    validation: dict[int, float] = field(default_factory=dict)
    """By iterations finished."""

    traffic: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By round, MB that were sent and received."""

    repeated: list[int] = field(default_factory=list)
    """Iterations that were done again."""

    memory: tuple[int, int] = (0, 0)
    """Bytes of gradients and of optimizer states."""

    @property
    def iteration(self) -> int:
        """The last one."""
        return max(self.losses, default=0)

    def read_line(self, line: str) -> None:
        """Take what a line says."""
        iteration, validation, memory = (pattern.search(line) for pattern in (_ITERATION, _VALIDATION, _MEMORY))
        if iteration:
            at = int(iteration[1])
            if at in self.losses:
                self.repeated.append(at)
            self.losses[at] = float(iteration[2])
            made = _ROUND.search(line)
            if made:
                self.traffic.setdefault(int(made[1]), (float(made[2]), float(made[3])))
        if validation:
            self.validation[int(validation[1])] = float(validation[2])
        if memory:
            self.memory = int(memory[1]), int(memory[2])


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What the server has written down."""

    events: list[dict[str, Any]]
    """Lines of its journal."""

    @classmethod
    def read(cls, journal: Path) -> "Rounds":
        """Read the journal, of which the last line may not be whole; no events when there is none yet."""
        text = journal.read_text(encoding="utf-8") if journal.exists() else ""
        return cls(events=[json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")])

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind."""
        return [event for event in self.events if event["event"] == kind]

    def uploaded(self, number: int) -> list[str]:
        """Return whose contributions to a round have come in, in their order; twice who sent it twice."""
        return [event["peer"] for event in self.of("uploaded") if event["round"] == number]

    @property
    def committed(self) -> dict[int, dict[str, Any]]:
        """The rounds, the common start left out."""
        return {event["round"]: event for event in self.of("committed") if event["round"] > 0}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the model."""
        (created,) = self.of("created")
        return {spec.name: spec.shape for spec in Catalog.from_json(created["catalog"])}


def summarize(peers: Sequence[Peer], rounds: Rounds, ownership: Ownership, interval: int) -> dict[str, Any]:
    """Return what summary.json says of peers and rounds."""
    shapes = rounds.shapes
    everything = training_bytes(shapes, weight_bytes=4)
    merged = [number for number, event in rounds.committed.items() if event.get("merged")]
    both_ways = 2 * everything.weights / 1e6
    found = []
    for index, peer in enumerate(peers):
        plain = [moved for number, moved in peer.traffic.items() if number not in merged]
        # The median, because a peer sends more in a round in which the server dies.
        up, down = (median(moved[way] for moved in plain) for way in (0, 1))
        theory = training_bytes(shapes, ownership, index, weight_bytes=4)
        found.append(
            {
                "peer": peer.name,
                "experts": list(ownership.owned_by(index)),
                "training_loss": mean(loss for at, loss in peer.losses.items() if at > peer.iteration - interval),
                "validation_loss": peer.validation[max(peer.validation)],
                "mb_up": up,
                "mb_down": down,
                "of_full_fp32": (up + down) / both_ways,
                "mb_down_merged": [peer.traffic[number][1] for number in merged if number in peer.traffic],
                "gradient_bytes": peer.memory[0],
                "optimizer_bytes": peer.memory[1],
                "theory_gradient_bytes": theory.gradients,
                "theory_optimizer_bytes": theory.optimizer,
                "iterations_done_twice": peer.repeated,
                "losses": peer.losses,
                "validation": peer.validation,
                "traffic_mb": peer.traffic,
            }
        )
    return {
        "peers": found,
        "parameters": everything.weights // 4,
        "full_fp32_mb_both_ways": both_ways,
        "all_experts": {"gradient_bytes": everything.gradients, "optimizer_bytes": everything.optimizer},
        "rounds": {number: _about(event) for number, event in rounds.committed.items()},
    }


def _about(event: dict[str, Any]) -> dict[str, Any]:
    known = ("contributors", "rejected", "merged", "digest", "bytes", "seconds")
    return {name: event[name] for name in known if name in event}


def table(summary: dict[str, Any]) -> str:
    """Return the results as text."""
    everything = summary["all_experts"]
    total = everything["gradient_bytes"] + everything["optimizer_bytes"]
    lines = [
        f"{'':<7}{'experts':>9}{'training':>10}{'validation':>12}{'MB up':>8}{'down':>7}{'of full fp32':>14}"
        f"{'gradients + optimizer':>23}{'theory':>9}{'all experts':>13}"
    ]
    for peer in summary["peers"]:
        held = peer["gradient_bytes"] + peer["optimizer_bytes"]
        theory = peer["theory_gradient_bytes"] + peer["theory_optimizer_bytes"]
        experts = f"{peer['experts'][0]}-{peer['experts'][-1]}"
        lines.append(
            f"{peer['peer']:<7}{experts:>9}{peer['training_loss']:>10.4f}{peer['validation_loss']:>12.4f}"
            f"{peer['mb_up']:>8.2f}{peer['mb_down']:>7.2f}{100 * peer['of_full_fp32']:>12.1f} %"
            f"{held / 1e6:>20.3f} MB{theory / 1e6:>9.3f}{total / 1e6:>13.3f}"
        )
    rounds, merged = summary["rounds"], [about for about in summary["rounds"].values() if "merged" in about]
    whole = sum(len(about["contributors"]) == len(summary["peers"]) for about in rounds.values())
    down = [size for peer in summary["peers"] for size in peer["mb_down_merged"]]
    lines += [
        "",
        f"{len(rounds)} rounds, {whole} of them with all {len(summary['peers'])} peers; MB are of a round (median). "
        f"The whole model in fp32 is {summary['full_fp32_mb_both_ways']:.2f} MB",
        f"both ways. {len(merged)} rounds merged experts"
        + (f", and sent {mean(down):.2f} MB down: a peer's own experts had changed, too." if down else "."),
        "Validation losses are of the common model after the last round, training losses means over its interval.",
    ]
    return "\n".join(lines)


def plot(summary: dict[str, Any], events: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw losses, bytes and memory into a PNG.

    Args:
        summary: as `summarize` returned it.
        events: what happened during the run, with `iteration` and `what`.
        file: to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, traffic, memory) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for peer in summary["peers"]:
        at = sorted(peer["losses"])
        losses.plot(at, [peer["losses"][each] for each in at], linewidth=0.6, alpha=0.6, label=peer["peer"])
    validation = summary["peers"][0]["validation"]
    losses.plot(*zip(*sorted(validation.items()), strict=True), "ko-", label="validation")
    for event in events:
        losses.axvline(event["iteration"], color="red", linestyle=":", linewidth=1)
        place = {"xycoords": ("data", "axes fraction"), "rotation": 90, "va": "top", "ha": "right"}
        losses.annotate(event["what"], (event["iteration"], 0.98), **place)
    losses.set(xlabel="iteration", ylabel="loss (nats per byte of text)", title="Loss")
    losses.legend(loc="lower left")
    names = [peer["peer"] for peer in summary["peers"]]
    for way, left in (("mb_up", [0.0] * len(names)), ("mb_down", [peer["mb_up"] for peer in summary["peers"]])):
        traffic.barh(names, [peer[way] for peer in summary["peers"]], left=left, label=way.replace("mb_", ""))
    traffic.axvline(summary["full_fp32_mb_both_ways"], color="black", label="whole model, both ways")
    traffic.set(xlabel="MB", title="Sent and received in a round")
    traffic.legend(loc="center right")
    everything = summary["all_experts"]
    left = [0.0] * len(names)
    for part in ("gradient", "optimizer"):
        sizes = [peer[f"{part}_bytes"] / 1e6 for peer in summary["peers"]]
        memory.barh(names, sizes, left=left, label=part)
        left = sizes
    memory.axvline(sum(everything.values()) / 1e6, color="black", label="training all experts")
    memory.set(xlabel="MB", title="Gradients and optimizer states")
    memory.legend(loc="center right")
    for axes in (losses, traffic, memory):
        axes.grid(alpha=0.3)
    for axes in (traffic, memory):
        axes.invert_yaxis()
        axes.set_xlim(left=0)
    figure.savefig(file, dpi=100)
    pyplot.close(figure)
