# SPDX-License-Identifier: Apache-2.0
"""Who counts in a round, and how much: decided from a few numbers, before any value is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ext.outer.penalty import Verdict
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.values.guards import Guards, Judged, OtherPeer
from megatron_ext.sync_service.values.merge import Merge

__all__ = ["Decision", "Measured", "decide"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What there is to know of one contribution."""

    squares: dict[Judged, float]
    """By what is judged as one, the squared L2 norm of the pseudo-gradient of what its peer trains; at the start of the
    values."""

    unusable: str | None = None
    """The first tensor that is non-finite, or beyond `LARGEST_NORM`."""

    nbytes: int = 0
    """Bytes on the disk."""


@dataclass(kw_only=True)
class Decision:
    """What is decided of a round."""

    norms: dict[str, float] = field(default_factory=dict)
    """By peer, the L2 norm of its pseudo-gradient over the tensors that it trains; of the values at the start."""

    rejected: dict[str, str] = field(default_factory=dict)
    """By peer, why its contribution does not count."""

    excluded: dict[str, dict[str, str]] = field(default_factory=dict)
    """By peer, the units in which the guards leave it out, with the reasons."""

    new_levels: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    """By peer, the units in which its norms have a new level for the guards: the mean before, and the new one."""

    lasting: dict[str, str] = field(default_factory=dict)
    """By peer, what to do about its being left out in many rounds running."""

    verdicts: dict[Judged, Verdict] | None = None
    """Which indices count in what is judged as one, and with which weights; None for everybody who is not rejected."""

    coefficients: dict[Judged, float] = field(default_factory=dict)
    """By what to multiply common pseudo-gradients; 1 where there is none. That of a contribution which comes alone is
    its weight too, 0 where it is left out."""

    weight: float = 1.0
    """Of a contribution that comes alone: the mean over what is judged as one, before it is clipped."""

    learned: str | None = None
    """What the guards know now."""

    nbytes: int = 0
    """Bytes of the contributions on the disk."""

    def clip(self, guards: Guards, squares: Mapping[Judged, float]) -> None:
        """Let no common pseudo-gradient be longer than the guards allow.

        Args:
            guards: know the limit.
            squares: their squared norms before they are multiplied by their coefficients.
        """
        for key, square in squares.items():
            before = self.coefficients.get(key, 1.0)
            self.coefficients[key] = before * guards.coefficient(before**2 * square)

    @property
    def is_plain(self) -> bool:
        """Whether everybody counts alike, in everything."""
        return not self.rejected and self.verdicts is None and not self.coefficients and self.learned is None


def decide(
    catalog: Catalog,
    contributors: Sequence[tuple[str, int]],
    measured: Sequence[Measured],
    *,
    guards: Guards | None,
    max_norm: float | None,
    is_start: bool,
    work: Mapping[int, int],
    beside: Mapping[int, OtherPeer] | None = None,
) -> Decision:
    """Decide who counts.

    Args:
        catalog: the tensors.
        contributors: (peer, index), in the order of their indices.
        measured: what is known of their contributions, in the same order.
        guards: decide who counts in which unit; None for everybody whose contribution is sound.
        max_norm: a contribution whose pseudo-gradient has a larger norm does not count.
        is_start: whether this is the common start: one peer's values, about which there is nothing else to decide.
        work: by index, by what a contribution is weighted; it counts as any other where nothing is said.
        beside: by index the other members, beside whose last contributions the only one is judged; None where peers
            meet.
    """
    decision = Decision(nbytes=sum(found.nbytes for found in measured))
    sound: dict[int, dict[Judged, float]] = {}
    for (peer, index), found in zip(contributors, measured, strict=True):
        if found.unusable is not None:
            decision.rejected[peer] = f"tensor {found.unusable!r} holds values that are non-finite, or far too large"
            continue
        # Exact, so that it does not matter in which order the units come.
        norm = decision.norms[peer] = math.sqrt(math.fsum(found.squares.values()))
        if max_norm is not None and not is_start and norm > max_norm:
            decision.rejected[peer] = f"the norm of its pseudo-gradient is {norm:.6g}; max_norm is {max_norm:.6g}"
            continue
        sound[index] = found.squares
    if guards is not None and not is_start:
        guards.decide(sound, work, {index: peer for peer, index in contributors}, beside)
        decision.verdicts, decision.learned = dict(guards.verdicts), guards.state
        if beside is not None:
            _count_alone(decision, contributors[0][1])
        lasting = guards.lasting()
        for peer, index in contributors:
            units = {} if peer in decision.rejected else _units_without(catalog, index, guards)
            if units:
                decision.excluded[peer] = units
            levels = guards.new_levels(index)
            if levels:
                decision.new_levels[peer] = levels
            if index in lasting:
                decision.lasting[peer] = lasting[index]
    return decision


def untouched(
    catalog: Catalog, contributors: Sequence[tuple[str, int]], decision: Decision, merge: Merge | None
) -> list[int]:
    """Return the places in the catalog of tensors that a round leaves as they were.

    Args:
        catalog: the tensors.
        contributors: (peer, index) of whose contributions were in.
        decision: who of them counts.
        merge: what the round makes of the experts besides.
    """
    sound = {index for peer, index in contributors if peer not in decision.rejected}
    found = []
    for place, spec in enumerate(catalog):
        # What all train has an outer step, whose momentum moves it.
        if not spec.owners or (merge is not None and spec.name in merge.names):
            continue
        counting = sound & set(spec.owners)
        if decision.verdicts is not None:
            counting &= set(decision.verdicts[spec.judged_as].accepted)
        if not counting:
            found.append(place)
    return found


def _count_alone(decision: Decision, index: int) -> None:
    """Let a contribution count by its weight among all, be it 0: it is one of those that make up an outer step."""
    verdicts = decision.verdicts or {}
    for key, verdict in verdicts.items():
        _, is_owned = key
        if not is_owned:
            decision.coefficients[key] = verdict.relative_weight(index)
            verdicts[key] = Verdict(accepted=(index,), weights=(1.0,))
    weights = list(decision.coefficients.values())
    decision.weight = math.fsum(weights) / len(weights) if weights else 1.0


def _units_without(catalog: Catalog, index: int, guards: Guards) -> dict[str, str]:
    """Return the units in which a peer does not count, with the reasons."""
    found: dict[str, str] = {}
    for spec in catalog:
        title = spec.judged_title
        if title not in found and spec.is_trained_by(index) and guards.excluded(spec, index):
            found[title] = guards.reason(spec, index)
    return found
