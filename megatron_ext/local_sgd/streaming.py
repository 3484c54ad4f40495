# SPDX-License-Identifier: Apache-2.0
"""Streaming DiLoCo: which units make up a fragment, and when a fragment's round begins (arXiv 2501.18512)."""

# Annotations are evaluated here (no postponed evaluation): Megatron's argument factory reads the types.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_ext.config_options import FromArgs, flag
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.outer.config import OuterOptimizerConfig

__all__ = ["StreamingConfig", "assign_fragments", "due_steps", "fragment_problem", "layer_count", "numbered"]


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(FromArgs):
    """Rounds of parts of the model, one after the other within an interval, and their overlap with training."""

    fragments: int = flag("--local-sgd-fragments", 1)
    """Cut the model into this many fragments of whole layers. Each has its own round once per interval, and
    these are spread evenly over the interval's steps, so that the largest amount sent at a time falls by as much."""

    pattern: Literal["strided", "sequential"] = flag(
        "--local-sgd-fragment-pattern", "strided", type=str, choices=["strided", "sequential"]
    )
    """Layers of a fragment: 'strided' = every P-th one, 'sequential' = neighbours. The embedding goes with the first
    layer, the final norm and the output layer with the last one."""

    sync_delay: int = flag("--local-sgd-fragment-sync-delay", 0)
    """Steps tau that training continues while a round is in flight; its result is applied after them. 0 waits."""

    update_alpha: float = flag("--local-sgd-fragment-update-alpha", 0.0)
    """What a worker keeps of its own weights where a round's result is applied: alpha * own + (1 - alpha) * global,
    in [0, 1]. 0 takes the global ones, and loses the steps that were made during the delay."""

    eager: bool = flag("--local-sgd-eager-updates", False)
    """Never wait: step by this worker's own share of the pseudo-gradient at once, and by the others' one round later
    (arXiv 2502.12996). Every worker then has an anchor and an outer state of its own."""

    @property
    def active(self) -> bool:
        """Whether workers differ after a round: in other fragments, by later steps, or by what they keep."""
        return self.fragments > 1 or self.in_background or self.eager

    @property
    def in_background(self) -> bool:
        """Whether a round's result is anything else than what the worker continues from at once."""
        return self.sync_delay > 0 or self.update_alpha > 0

    def problems(self, local_sgd: LocalSGDConfig, outer: OuterOptimizerConfig) -> list[str]:
        """Return the problems of the values, one sentence each."""
        found = []
        interval = local_sgd.local_sgd_sync_interval
        if self.fragments < 1:
            found.append(f"--local-sgd-fragments is {self.fragments}; it must be at least 1")
        elif self.fragments == 1 and self.pattern != type(self)().pattern:
            found.append("--local-sgd-fragment-pattern has no effect without --local-sgd-fragments above 1; drop it")
        if self.fragments > 1 and not outer.is_sgd and not outer.is_average:
            found.append(
                f"--local-sgd-fragments above 1 steps fragments apart, which --outer-optimizer {outer.name} "
                "has not been tested with; use sgd or none"
            )
        if not 0 <= self.sync_delay < max(interval, 1):
            found.append(
                f"--local-sgd-fragment-sync-delay is {self.sync_delay}; it must be 0 or more, and below "
                f"--local-sgd-sync-interval {interval}"
            )
        if self.eager:
            found += self._eager_problems(local_sgd)
        if not 0 <= self.update_alpha <= 1:
            found.append(f"--local-sgd-fragment-update-alpha is {self.update_alpha}; it must be in 0 to 1")
        return found

    def _eager_problems(self, local_sgd: LocalSGDConfig) -> list[str]:
        wrong = {
            "decides over a round before the others' messages are there; drop the options of the penalty": (
                local_sgd.has_penalty
            ),
            "is not combined with --local-sgd-codec; drop one of them": local_sgd.codec is not None,
            "is not combined with --local-sgd-use-async; drop one of them": local_sgd.use_async,
            "has a delay of a whole interval already; drop --local-sgd-fragment-sync-delay and "
            "--local-sgd-fragment-update-alpha": self.in_background,
            "has no synced weights; validate each worker's own with --local-sgd-evaluation workers": (
                local_sgd.local_sgd_evaluation == "synced"
            ),
        }
        return [f"--local-sgd-eager-updates {problem}" for problem, is_wrong in wrong.items() if is_wrong]


def fragment_problem(fragments: int, layers: int, said: str) -> str | None:
    """Return the problems of a number of fragments of a model with `layers` layers, which are called `said`."""
    if fragments <= layers:
        return None
    return f"--local-sgd-fragments is {fragments}; it must be at most {said} {layers}: every fragment needs a layer"


def layer_count(units: Sequence[str]) -> int:
    """Return how many fragments can be made of units: as many as layers, or as units where none is a layer."""
    return sum(map(numbered, units)) or len(units)


def numbered(unit: str) -> bool:
    """Return whether a unit is one of the layers, as its name's last part tells."""
    return unit.rpartition(".")[2].isdigit()


def assign_fragments(units: Sequence[str], count: int, pattern: str) -> list[tuple[str, ...]]:
    """Return the units of every fragment, each in model order; together they are all units, each once.

    Args:
        units: in model order. Those that are not layers go with the layer that follows, or else with the last one.
        count: fragments, at most as many as layers.
        pattern: 'strided' or 'sequential'.

    Raises:
        ValueError: there are fewer layers than fragments.
    """
    layers = [unit for unit in units if numbered(unit)] or list(units)
    if not 1 <= count <= max(len(layers), 1):
        raise ValueError(f"{count} fragments of {len(layers)} layers; every fragment needs a layer")
    place = {}
    for index, layer in enumerate(layers):
        place[layer] = index % count if pattern == "strided" else index * count // len(layers)
    fragments: list[list[str]] = [[] for _ in range(count)]
    following = layers[-1] if layers else ""
    for unit in reversed(units):
        following = unit if unit in place else following
        fragments[place[following]].append(unit)
    return [tuple(reversed(members)) for members in fragments]


def due_steps(count: int, interval: int) -> list[int]:
    """Return for every fragment the step of an interval, 1 to `interval`, after which its round begins.

    The last one's is the interval's end, so that a single fragment is plain DiLoCo.
    """
    return [max(interval * (fragment + 1) // count, 1) for fragment in range(count)]
