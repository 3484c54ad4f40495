# SPDX-License-Identifier: Apache-2.0
"""What a round does to the values: contributions are judged, reduced and stepped by, tensor after tensor; then experts
may be merged.

Everything is read from the disk and written to it, so that memory holds a few tensors whatever the number of peers, and
a round that fails halfway has changed nothing. Peers come in the order of their indices: who uploaded first changes no
bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from megatron_ext.local_sgd.delayed_nesterov import DelayedNesterov
from megatron_ext.local_sgd.outer_config import OuterOptimizerConfig
from megatron_ext.local_sgd.outer_optimizer import OuterOptimizer, build_outer_optimizer
from megatron_ext.local_sgd.penalty import Verdict
from megatron_ext.local_sgd.reducers import Linear
from megatron_ext.sync_service.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.digest import RoundDigest
from megatron_ext.sync_service.failpoints import Failpoints
from megatron_ext.sync_service.frames import whole_box
from megatron_ext.sync_service.guards import Guards, Judged, judged_as
from megatron_ext.sync_service.merge import Merge
from megatron_ext.sync_service.refusal import Refusal
from megatron_ext.sync_service.snapshot import Snapshot, SnapshotWriter, state_name
from megatron_ext.sync_service.spool import Contribution
from megatron_ext.sync_service.updates import RESIDUAL, UPDATE, full, publish, publish_exactly

__all__ = ["Alone", "Contributor", "DamagedContribution", "Outcome", "Reduction"]

_ADD = Linear(normalize=False)


class DamagedContribution(Exception):
    """A contribution cannot be read any more; its peer has to upload it again."""

    def __init__(self, peer: str, problem: str) -> None:
        super().__init__(f"the contribution of peer {peer!r} is damaged on the server's disk: {problem}")
        self.peer = peer
        self.problem = problem


@dataclass(frozen=True, kw_only=True)
class Contributor:
    """A peer whose contribution was in when the round closed."""

    peer: str
    """Its name."""

    index: int
    """Its place among the peers."""

    contribution: Contribution
    """What it has uploaded."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """How a contribution counts that does not wait for others."""

    weight: float
    """Of its pseudo-gradient; 1 where all peers make as many steps."""

    per_step: int
    """How many contributions make up one outer step; each counts one part of it."""


@dataclass(kw_only=True)
class Outcome:
    """What came of a round; its values are in the snapshot."""

    digest: str = ""
    """Of the values."""

    outer_scalars: dict[str, float] = field(default_factory=dict)
    """States of the outer optimizer that all tensors share."""

    norms: dict[str, float] = field(default_factory=dict)
    """By peer, the L2 norm of its pseudo-gradient over the tensors that it trains; of the values at the start."""

    rejected: dict[str, str] = field(default_factory=dict)
    """By peer, why its contribution did not count."""

    excluded: dict[str, dict[str, str]] = field(default_factory=dict)
    """By peer, the units in which the guards have left it out, with the reasons."""

    merged: float = 0.0
    """How much experts took over from each other; 0 where nothing was merged."""


class _Scratch:
    """Memory for two tensors at a time that is used again and again: fresh memory costs more than what is read into."""

    def __init__(self, numel: int) -> None:
        """Take the number of elements of the largest tensor; no memory is taken before it is used."""
        self.first, self.second = torch.empty(2, numel, dtype=torch.float32)


class Reduction:
    """One round's work."""

    def __init__(
        self,
        catalog: Catalog,
        optimizer: OuterOptimizerConfig,
        *,
        codec: str,
        max_norm: float | None,
        before: Snapshot | None,
        outer_scalars: Mapping[str, float],
        failpoints: Failpoints,
        guards: Guards | None = None,
        merge: Merge | None = None,
        alone: Alone | None = None,
    ) -> None:
        """Prepare.

        Args:
            catalog: the tensors.
            optimizer: the outer optimizer.
            codec: of the contributions: values with fp32 in rounds of several, else pseudo-gradients.
            max_norm: a contribution whose pseudo-gradient has a larger norm does not count.
            before: the last round; None at the start, which has no pseudo-gradients.
            outer_scalars: of the last round.
            failpoints: where to die in tests.
            guards: decide who counts in which unit; None for everybody whose contribution is sound.
            merge: what is done to the experts at the end; None for nothing.
            alone: given where the round is one contribution's alone, which is a pseudo-gradient with any codec.
        """
        self._catalog = catalog
        self._config = optimizer
        self._alone = alone
        self._is_exact = codec == "fp32" or before is None
        self._absolute = before is None or (codec == "fp32" and alone is None)
        self._codec = codec
        self._max_norm = max_norm
        self._before = before
        self._scalars = dict(outer_scalars)
        self._failpoints = failpoints
        # The start is one peer's values, about which there is nothing to decide.
        self._guards = guards if before is not None else None
        self._merge = merge
        self._merged = frozenset[str]() if merge is None else merge.names
        self._coefficients: dict[Judged, float] = {}
        # What the optimizer keeps is known after a step, and the head of a snapshot wants it before the first one.
        tried = self._optimizer([torch.zeros(2)])
        tried.step(0, slice(0, 2), torch.ones(2))
        self._states = sorted(tried.tensor_state())
        self._is_fresh = bool(tried.scalar_state()) and not self._scalars

    def judge(self, contributors: list[Contributor]) -> Outcome:
        """Find out whose contributions count.

        Args:
            contributors: in the order of their indices.

        Raises:
            DamagedContribution: one cannot be read.
        """
        outcome = Outcome()
        sound: dict[int, dict[Judged, float]] = {}
        scratch = _Scratch(max((spec.numel for spec in self._catalog), default=0))
        for contributor in contributors:
            squares, broken = self._squares(contributor, scratch)
            if broken is not None:
                outcome.rejected[contributor.peer] = f"tensor {broken!r} holds values that are not finite"
                continue
            norm = outcome.norms[contributor.peer] = math.sqrt(sum(squares.values()))
            if self._max_norm is not None and self._before is not None and norm > self._max_norm:
                outcome.rejected[contributor.peer] = (
                    f"the norm of its pseudo-gradient is {norm:.6g}; max_norm is {self._max_norm:.6g}"
                )
                continue
            sound[contributor.index] = squares
        if self._guards is not None:
            self._guards.decide(sound)
            for contributor in contributors:
                if contributor.peer not in outcome.rejected:
                    units = self._units_without(contributor, self._guards)
                    if units:
                        outcome.excluded[contributor.peer] = units
        return outcome

    def write(self, path: Path, contributors: list[Contributor], outcome: Outcome) -> SnapshotWriter:
        """Make the round's values.

        Args:
            path: of the snapshot.
            contributors: in the order of their indices; at the start one that counts.
            outcome: says who counts; gets the digest and the outer optimizer's scalars.

        Returns:
            The snapshot, which is durable but has not its name yet.

        Raises:
            DamagedContribution: one cannot be read.
            OSError: the snapshot cannot be written; nothing of it is left.
        """
        states = self._states if self._before is not None else []
        learned = {} if self._guards is None else {"guards": self._guards.state}
        if self._guards is not None and self._guards.clips:
            self._coefficients = self._clip_coefficients(contributors, outcome, self._guards)
        metadata = {"format": "pt", "round": path.stem, **learned}
        if self._is_exact:
            writer = SnapshotWriter(path, self._catalog, states, metadata)
        else:
            writer = SnapshotWriter(path, self._catalog, [*states, RESIDUAL], metadata, [UPDATE])
        outcome.outer_scalars = dict(self._scalars)
        try:
            digest = RoundDigest()
            for spec in self._catalog:
                values, kept = self._reduced(spec, contributors, outcome)
                if self._merge is None:
                    digest.add(spec.name, spec.shape, whole_box(spec.shape), values)
                writer.write(spec.name, values)
                for state, tensor in kept.items():
                    writer.write(state_name(state, spec.name), tensor)
                del values, kept  # they may be a contribution's memory
                self._failpoints.hit("tensor_reduced")
            if self._merge is not None:
                self._merge.run(writer, self._failpoints)
                outcome.merged = self._merge.alpha
                for spec in self._catalog:
                    digest.add(spec.name, spec.shape, whole_box(spec.shape), writer.read(spec.name))
            writer.sync()
        except BaseException:
            writer.abandon()
            raise
        outcome.digest = digest.hex()
        return writer

    def _squares(self, contributor: Contributor, scratch: _Scratch) -> tuple[dict[Judged, float], str | None]:
        """Return the squared norms of a contribution, and the first tensor of it that is not finite."""
        squares: dict[Judged, float] = {}
        for spec in self._catalog:
            if self._before is not None and not spec.is_trained_by(contributor.index):
                continue
            square = _square(self._gradient(spec, contributor, scratch))
            if not math.isfinite(square):
                return {}, spec.name
            squares[judged_as(spec)] = squares.get(judged_as(spec), 0.0) + square
        return squares, None

    def _units_without(self, contributor: Contributor, guards: Guards) -> dict[str, str]:
        """Return the units in which a peer does not count, with the reasons."""
        index = contributor.index
        found: dict[str, str] = {}
        for spec in self._catalog:
            unit, is_owned = judged_as(spec)
            title = f"{unit} (its own experts)" if is_owned else unit
            if title not in found and spec.is_trained_by(index) and guards.excluded(spec, index):
                found[title] = guards.reason(spec, index)
        return found

    def _clip_coefficients(
        self, contributors: list[Contributor], outcome: Outcome, guards: Guards
    ) -> dict[Judged, float]:
        """Return by what to multiply the common pseudo-gradients of the units that all peers train."""
        squares: dict[Judged, float] = {}
        for spec in self._catalog:
            verdict = self._verdict(spec, contributors, outcome)
            if spec.owners or not verdict.accepted:
                continue
            accepted = [contributors[place] for place in verdict.accepted]
            common = _mean(partial(self._gradient, spec), accepted, verdict)
            squares[judged_as(spec)] = squares.get(judged_as(spec), 0.0) + _square(common)
        return {key: guards.coefficient(square) for key, square in squares.items()}

    def _reduced(
        self, spec: TensorSpec, contributors: list[Contributor], outcome: Outcome
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return a tensor's new values, and the states of its outer optimizer."""
        verdict = self._verdict(spec, contributors, outcome)
        accepted = [contributors[place] for place in verdict.accepted]
        if self._before is None:
            return self._values(spec, accepted[0]), {}
        if not spec.owners:
            return self._stepped(spec, accepted, verdict, outcome)
        if self._absolute:
            return (_mean(partial(self._values, spec), accepted, verdict) if accepted else self._anchor(spec)), {}
        return self._of_owners(spec, accepted, verdict)

    def _of_owners(
        self, spec: TensorSpec, accepted: list[Contributor], verdict: Verdict
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return what peers hold of a tensor with owners after their pseudo-gradients, and the update."""
        anchor = self._anchor(spec)
        if not accepted:
            published = publish_exactly(self._codec, anchor, torch.zeros_like(anchor))
        elif spec.name in self._merged or len(accepted) > 1:
            # What is to be merged, or a mean for whose rest there is no place, is sent as it is.
            published = full(_mean(partial(self._values, spec), accepted, verdict))
        else:
            published = publish_exactly(self._codec, anchor, self._gradient(spec, accepted[0]).neg_())
        return published.values, {UPDATE: published.update}

    def _stepped(
        self, spec: TensorSpec, accepted: list[Contributor], verdict: Verdict, outcome: Outcome
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return a tensor that all peers train, after its outer step, and the states of the optimizer."""
        anchor = self._anchor(spec)
        if not self._is_exact and self._before is not None and state_name(RESIDUAL, spec.name) in self._before:
            anchor += self._before.read(state_name(RESIDUAL, spec.name))
        optimizer = self._optimizer([anchor])
        if self._before is not None and not self._is_fresh:
            keys = {name: state_name(name, spec.name) for name in self._states}
            found = {name: [self._before.read(key)] for name, key in keys.items() if key in self._before}
            optimizer.load(found, self._scalars)
        coefficient = self._coefficients.get(judged_as(spec), 1.0) if self._alone is None else self._alone.weight
        if accepted and self._config.outer_optimizer == "none" and self._absolute and coefficient == 1:
            # The mean itself, not the anchor minus the mean difference: one peer gets back what it sent.
            anchor = _mean(partial(self._values, spec), accepted, verdict)
        elif accepted:
            gradient = _mean(partial(self._gradient, spec), accepted, verdict)
            optimizer.step(0, slice(0, spec.numel), gradient.mul_(coefficient) if coefficient != 1 else gradient)
            outcome.outer_scalars = optimizer.scalar_state()
        states = {name: tensors[0] for name, tensors in optimizer.tensor_state().items()}
        zeros = {name: torch.zeros(spec.numel) for name in self._states}
        kept = {**zeros, **states}
        if self._is_exact:
            return anchor, kept
        published = full(anchor) if spec.name in self._merged else publish(self._codec, self._anchor(spec), anchor)
        return published.values, {**kept, RESIDUAL: published.residual, UPDATE: published.update}

    def _optimizer(self, anchors: list[torch.Tensor]) -> OuterOptimizer:
        if self._alone is None:
            return build_outer_optimizer(self._config, anchors)
        has_optimizer = self._config.outer_optimizer != "none"
        return DelayedNesterov(
            anchors,
            lr=self._config.learning_rate if has_optimizer else 1.0,
            momentum=self._config.outer_optimizer_momentum if has_optimizer else 0.0,
            count=self._alone.per_step,
        )

    def _verdict(self, spec: TensorSpec, contributors: list[Contributor], outcome: Outcome) -> Verdict:
        """Return who counts in a tensor, by the place among the contributors, and with which weight."""
        accepted = tuple(
            place
            for place, contributor in enumerate(contributors)
            if contributor.peer not in outcome.rejected
            and (self._before is None or spec.is_trained_by(contributor.index))
        )
        if self._guards is not None:
            return self._guards.verdict(spec, [(place, contributors[place].index) for place in accepted])
        return Verdict(accepted=accepted, weights=(1.0,) * len(accepted))

    def _anchor(self, spec: TensorSpec, out: torch.Tensor | None = None) -> torch.Tensor:
        assert self._before is not None
        return self._before.read(spec.name, out=out)

    def _uploaded(self, spec: TensorSpec, contributor: Contributor, out: torch.Tensor | None = None) -> torch.Tensor:
        try:
            return contributor.contribution.read(spec, out)
        except (Refusal, OSError) as error:
            raise DamagedContribution(contributor.peer, str(error)) from error

    def _gradient(self, spec: TensorSpec, contributor: Contributor, scratch: _Scratch | None = None) -> torch.Tensor:
        """Return a peer's pseudo-gradient of a tensor, in `scratch` if that is given; at the start its values."""
        uploaded = self._uploaded(spec, contributor, None if scratch is None else scratch.first)
        if self._before is None or not self._absolute:
            return uploaded
        return torch.sub(self._anchor(spec, None if scratch is None else scratch.second), uploaded, out=uploaded)

    def _values(self, spec: TensorSpec, contributor: Contributor) -> torch.Tensor:
        uploaded = self._uploaded(spec, contributor)
        return uploaded if self._absolute else torch.sub(self._anchor(spec), uploaded, out=uploaded)


def _square(values: torch.Tensor) -> float:
    """Return the squared L2 norm of 1-D values, added up in fp64."""
    # Part by part: a copy of the whole in fp64 would be the largest thing in memory.
    norms = (float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in torch.split(values, 1 << 20))
    return sum(norm * norm for norm in norms)


def _mean(
    read: Callable[[Contributor], torch.Tensor], accepted: Sequence[Contributor], verdict: Verdict
) -> torch.Tensor:
    """Return the weighted mean of what is read of contributors, of which two at a time are in memory.

    `Linear` adds in order, so that adding one after the other gives the same bits as giving it all of them.
    """
    # No term gets a name (a loop's variable would keep it while the next one is read).
    total = read(accepted[0]).mul_(verdict.weights[0])
    for contributor, weight in zip(accepted[1:], verdict.weights[1:], strict=True):
        total = _ADD([total, read(contributor)], [1.0, weight])
    return total.div_(sum(verdict.weights))
