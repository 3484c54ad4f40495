# SPDX-License-Identifier: Apache-2.0
"""What a round does to the values: contributions are measured, reduced and stepped by, tensor after tensor; then
experts may be merged.

Everything is read from the disk and written to it, block by block, so that memory holds a few blocks whatever the
number of peers, and a round that fails halfway has changed nothing. Peers come in the order of their indices: who
uploaded first changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_ext.local_sgd.delayed_nesterov import DelayedNesterov
from megatron_ext.local_sgd.outer_config import OuterOptimizerConfig
from megatron_ext.local_sgd.outer_optimizer import OuterOptimizer, build_outer_optimizer
from megatron_ext.local_sgd.penalty import Verdict
from megatron_ext.sync_service.blocks import Block
from megatron_ext.sync_service.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.decision import Decision, Measured
from megatron_ext.sync_service.digest import RoundDigest
from megatron_ext.sync_service.failpoints import Failpoints
from megatron_ext.sync_service.guards import Judged, judged_as
from megatron_ext.sync_service.merge import Merge
from megatron_ext.sync_service.snapshot import Snapshot, SnapshotWriter, state_name
from megatron_ext.sync_service.sources import Contributor, DamagedContribution, Memory, Sources
from megatron_ext.sync_service.spares import SpareFiles
from megatron_ext.sync_service.updates import RESIDUAL, UPDATE, Published, full, publish, publish_exactly

__all__ = ["LARGEST_NORM", "Alone", "Contributor", "DamagedContribution", "Made", "Reduction"]

LARGEST_NORM = 1e15
"""Of a tensor's pseudo-gradient: more is broken, though finite. Sums, momentum and the squares that Adam keeps of what
is below stay far from the end of fp32, so that a round's values are always finite."""

_Squares = dict[Judged, float]
"""Squared norms by what is judged as one."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """How a contribution counts that does not wait for others."""

    weight: float
    """Of its pseudo-gradient; 1 where all peers make as many steps."""

    per_step: int
    """How many contributions make up one outer step; each counts one part of it."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """What came of a round beside its values, which are in the snapshot."""

    sums: tuple[int, int]
    """Of the digest of the values."""

    outer_scalars: dict[str, float]
    """States of the outer optimizer that all tensors share."""

    as_uploaded: dict[str, str] = field(default_factory=dict)
    """By the names of tensors, whose contribution alone is what they have become."""


class _Broken(Exception):
    """A contribution is not finite, or far too large."""


class _Whole(Exception):
    """A tensor cannot be made block by block."""


@dataclass
class _Tensor:
    """What came of a tensor beside its values."""

    sums: tuple[int, int] = (0, 0)
    """Of the digest of its values."""

    squares: dict[int, float] = field(default_factory=dict)
    """Squared norms of the pseudo-gradients, by the place of the contributor."""

    scalars: dict[str, float] | None = None
    """States of the outer optimizer that all tensors share; None where there was no step."""

    is_coded: bool = True
    """Whether a lossy codec can say what was added."""


class Reduction:
    """One round's work."""

    def __init__(
        self,
        catalog: Catalog,
        optimizer: OuterOptimizerConfig,
        *,
        codec: str,
        before: Snapshot | None,
        outer_scalars: Mapping[str, float],
        failpoints: Failpoints,
        merge: Merge | None = None,
        alone: Alone | None = None,
        spares: SpareFiles | None = None,
    ) -> None:
        """Prepare.

        Args:
            catalog: the tensors.
            optimizer: the outer optimizer.
            codec: of the contributions: values with fp32 in rounds of several, else pseudo-gradients.
            before: the last round; None at the start, which has no pseudo-gradients.
            outer_scalars: of the last round.
            failpoints: where to die in tests.
            merge: what is done to the experts at the end; None for nothing.
            alone: given where the round is one contribution's alone, which is a pseudo-gradient with any codec.
            spares: has a file for the snapshot to be written over, perhaps.
        """
        self._spares = spares
        self._catalog = catalog
        self._config = optimizer
        self._alone = alone
        self._is_exact = codec == "fp32" or before is None
        self._codec = codec
        self._before = before
        self._scalars = dict(outer_scalars)
        self._failpoints = failpoints
        self._merge = merge
        self._merged = frozenset[str]() if merge is None else merge.names
        self._memory = Memory()
        # What the optimizer keeps is known after a step, and the head of a snapshot wants it before the first one.
        tried = self._optimizer([torch.zeros(2)])
        tried.step(0, slice(0, 2), torch.ones(2))
        self._states = sorted(tried.tensor_state())
        self._is_fresh = bool(tried.scalar_state()) and not self._scalars
        absolute = before is None or (codec == "fp32" and alone is None)
        self._sources = Sources(codec, before, absolute=absolute, by_blocks=tried.elementwise)

    # -----------------------------------------------------------------------------------------------------------
    # What the decision needs
    # -----------------------------------------------------------------------------------------------------------

    def measure(self, contributors: list[Contributor]) -> list[Measured]:
        """Find out what the decision about the round needs.

        Args:
            contributors: in the order of their indices.

        Raises:
            DamagedContribution: one cannot be read.
        """
        return [self._measured(contributor) for contributor in contributors]

    def _measured(self, contributor: Contributor) -> Measured:
        nbytes = contributor.contribution.nbytes
        squares: _Squares = {}
        for spec in self._catalog:
            if self._before is not None and not spec.is_trained_by(contributor.index):
                continue
            square = sum(map(_square, self._sources.gradients(spec, contributor)))
            if not square <= LARGEST_NORM**2:
                return Measured(squares={}, broken=spec.name, nbytes=nbytes)
            _add(squares, spec, square)
        return Measured(squares=squares, nbytes=nbytes)

    def common_squares(self, contributors: list[Contributor], decision: Decision) -> dict[Judged, float]:
        """Return the squared norms of the common pseudo-gradients of the units that all peers train.

        Args:
            contributors: in the order of their indices.
            decision: says who counts.

        Raises:
            DamagedContribution: one cannot be read.
        """
        squares: _Squares = {}
        for spec in self._catalog:
            verdict = self._verdict(spec, contributors, decision)
            if spec.owners or not verdict.accepted:
                continue
            reader, sources = self._sources.checked(spec.name), self._sources
            for at in sources.blocks(spec, [contributors[place] for place in verdict.accepted]):
                anchor, total = sources.anchor(reader, at), None
                for place, weight in zip(verdict.accepted, verdict.weights, strict=True):
                    gradient = sources.gradient(anchor, sources.uploaded(spec, contributors[place], at))
                    total = self._accumulated(total, gradient, weight)
                assert total is not None
                _add(squares, spec, _square(_divided(total, verdict)))
        return squares

    # -----------------------------------------------------------------------------------------------------------
    # The values
    # -----------------------------------------------------------------------------------------------------------

    def write(self, path: Path, contributors: list[Contributor], decision: Decision) -> tuple[SnapshotWriter, Made]:
        """Make the round's values.

        Args:
            path: of the snapshot.
            contributors: in the order of their indices; at the start one that counts.
            decision: says who counts.

        Returns:
            The snapshot, which is durable but has not its name yet, and what there is to say of it.

        Raises:
            DamagedContribution: one cannot be read.
            OSError: the snapshot cannot be written; nothing of it is left.
        """
        return self._written(path, contributors, decision, None)

    def attempt(
        self, path: Path, contributors: list[Contributor]
    ) -> tuple[list[Measured], tuple[SnapshotWriter, Made] | None]:
        """Find out what the decision needs, and make the round meanwhile as if everybody counted.

        So everything is read once, not twice.

        Args:
            path: of the snapshot.
            contributors: in the order of their indices.

        Returns:
            What `measure` and `write` return; None for the latter where a contribution is broken.

        Raises:
            DamagedContribution: one cannot be read.
            OSError: the snapshot cannot be written; nothing of it is left.
        """
        squares: list[_Squares] = [{} for _ in contributors]
        try:
            written = self._written(path, contributors, Decision(), squares)
        except _Broken:
            return self.measure(contributors), None
        found = zip(contributors, squares, strict=True)
        return [Measured(squares=own, nbytes=entry.contribution.nbytes) for entry, own in found], written

    def _written(
        self, path: Path, contributors: list[Contributor], decision: Decision, squares: list[_Squares] | None
    ) -> tuple[SnapshotWriter, Made]:
        """Make the round's values, and measure every contribution where there is a place for what comes of it.

        Raises:
            _Broken: one is, while it is measured.
        """
        writer = self._writer(path, decision)
        scalars, sums = dict(self._scalars), []
        as_uploaded: dict[str, str] = {}
        try:
            for spec in self._catalog:
                made = self._tensor(writer, spec, contributors, decision, measures=squares is not None)
                for place, square in made.squares.items():
                    assert squares is not None
                    _add(squares[place], spec, square)
                owner = self._sole_owner(spec, contributors, decision)
                if owner is not None and made.is_coded:
                    as_uploaded[spec.name] = owner
                scalars = scalars if made.scalars is None else made.scalars
                sums.append(made.sums)
                self._failpoints.hit("tensor_reduced")
            if self._merge is not None:
                self._merge.run(writer, self._failpoints)
                sums = [self._sums_of(writer, spec) for spec in self._catalog]
            writer.sync()
        except BaseException:
            writer.abandon()
            raise
        return writer, Made(sums=RoundDigest(sums).sums, outer_scalars=scalars, as_uploaded=as_uploaded)

    def _writer(self, path: Path, decision: Decision) -> SnapshotWriter:
        states = self._states if self._before is not None else []
        learned = {} if decision.learned is None else {"guards": decision.learned}
        metadata = {"format": "pt", "round": path.stem, **learned}
        if self._is_exact:
            return SnapshotWriter(path, self._catalog, states, metadata, spares=self._spares)
        return SnapshotWriter(path, self._catalog, [*states, RESIDUAL], metadata, [UPDATE], spares=self._spares)

    def _tensor(
        self,
        writer: SnapshotWriter,
        spec: TensorSpec,
        contributors: list[Contributor],
        decision: Decision,
        *,
        measures: bool,
    ) -> _Tensor:
        """Write a tensor's new values and the states that belong to it."""
        verdict = self._verdict(spec, contributors, decision)
        involved = [
            place
            for place, contributor in enumerate(contributors)
            if place in verdict.accepted
            or (measures and (self._before is None or spec.is_trained_by(contributor.index)))
        ]
        blocks = self._sources.blocks(spec, [contributors[place] for place in involved])
        work = (writer, spec, contributors, decision, verdict, involved if measures else [])
        try:
            return self._by_blocks(blocks, *work)
        except _Whole:
            return self._by_blocks([(0, spec.numel)], *work)

    def _by_blocks(
        self,
        blocks: list[Block],
        writer: SnapshotWriter,
        spec: TensorSpec,
        contributors: list[Contributor],
        decision: Decision,
        verdict: Verdict,
        measured: list[int],
    ) -> _Tensor:
        made, digest, sources = _Tensor(squares=dict.fromkeys(measured, 0.0)), RoundDigest(), self._sources
        coefficient = decision.coefficients.get(judged_as(spec), 1.0) if self._alone is None else self._alone.weight
        takes_values = self._takes_values(spec, verdict, coefficient)
        weight_of = dict(zip(verdict.accepted, verdict.weights, strict=True))
        reader = sources.checked(spec.name)
        readers = {
            name: found
            for name in ([] if spec.owners else [*self._states, RESIDUAL])
            if (found := sources.checked(state_name(name, spec.name))) is not None
        }
        for at in blocks:
            anchor, total = sources.anchor(reader, at), None
            for place in sorted({*measured, *weight_of}):
                uploaded = sources.uploaded(spec, contributors[place], at)
                gradient = uploaded
                if place in made.squares or not takes_values:
                    gradient = sources.gradient(anchor, uploaded)
                if place in made.squares:
                    made.squares[place] += _square(gradient)
                    if not made.squares[place] <= LARGEST_NORM**2:
                        raise _Broken
                if place in weight_of:
                    taken = sources.values(anchor, uploaded) if takes_values else gradient
                    total = self._accumulated(total, taken, weight_of[place])
            total = None if total is None else _divided(total, verdict)
            kept: dict[str, torch.Tensor] = {}
            if anchor is None:
                assert total is not None
                values = total
            elif spec.owners:
                values, kept = self._of_owners(spec, anchor, total, takes_values)
            else:
                before = {name: found.read(*at, out=self._memory(name, at[1])) for name, found in readers.items()}
                values, kept, made.scalars = self._stepped(spec, anchor, total, takes_values, coefficient, before)
            _require_finite(spec, values)
            is_coded = UPDATE not in kept or not bool(kept[UPDATE][0].isnan())
            if at[0] > 0 and is_coded != made.is_coded:
                raise _Whole  # what is sent is either the values of the whole tensor or an update of it
            made.is_coded = is_coded
            digest.add_range(spec.name, at[0], values)
            writer.write(spec.name, values, at[0])
            for state, tensor in kept.items():
                writer.write(state_name(state, spec.name), tensor, at[0])
        made.sums = digest.sums
        return made

    def _takes_values(self, spec: TensorSpec, verdict: Verdict, coefficient: float) -> bool:
        """Return whether a tensor's new values are the mean of the values that were uploaded."""
        if self._before is None:
            return True
        if spec.owners:
            # What is to be merged, or a mean for whose rest there is no place, is sent as it is.
            return self._sources.absolute or spec.name in self._merged or len(verdict.accepted) > 1
        # The mean itself, not the anchor minus the mean difference: one peer gets back what it sent.
        return self._config.outer_optimizer == "none" and self._sources.absolute and coefficient == 1

    def _of_owners(
        self, spec: TensorSpec, anchor: torch.Tensor, total: torch.Tensor | None, takes_values: bool
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return what peers hold of a tensor with owners after what these have sent, and the update."""
        if self._sources.absolute:
            return anchor if total is None else total, {}
        if total is None:
            published = publish_exactly(self._codec, anchor, torch.zeros_like(anchor))
        elif takes_values:
            published = full(total)
        else:
            published = publish_exactly(self._codec, anchor, total.neg_())
        return published.values, {UPDATE: published.update}

    def _stepped(
        self,
        spec: TensorSpec,
        anchor: torch.Tensor,
        total: torch.Tensor | None,
        takes_values: bool,
        coefficient: float,
        before: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, float] | None]:
        """Return a tensor that all peers train, after its outer step, and the states of the optimizer."""
        if takes_values and self._is_exact and not self._states:
            return anchor if total is None else total, {}, None
        moved = self._memory("moved", anchor.numel()).copy_(anchor)
        if not self._is_exact and RESIDUAL in before:
            moved += before[RESIDUAL]
        optimizer = self._optimizer([moved])
        if not self._is_fresh:
            optimizer.load({name: [before[name]] for name in self._states if name in before}, self._scalars)
        scalars = None
        if total is not None and takes_values:
            moved = total
        elif total is not None:
            gradient = total.mul_(coefficient) if coefficient != 1 else total
            optimizer.step(0, slice(0, moved.numel()), gradient)
            scalars = optimizer.scalar_state()
        states = {name: tensors[0] for name, tensors in optimizer.tensor_state().items()}
        zeros = {name: torch.zeros_like(anchor) for name in self._states if name not in states}
        kept = {**zeros, **states}
        if self._is_exact:
            return moved, kept, scalars
        published: Published = full(moved) if spec.name in self._merged else publish(self._codec, anchor, moved)
        return published.values, {**kept, RESIDUAL: published.residual, UPDATE: published.update}, scalars

    def _accumulated(self, total: torch.Tensor | None, term: torch.Tensor, weight: float) -> torch.Tensor:
        """Return the sum of weighted terms, in order; the term may be used up."""
        if weight != 1:
            term.mul_(weight)
        if total is None:
            return self._memory("total", term.numel()).copy_(term)
        return total.add_(term)

    def _sole_owner(self, spec: TensorSpec, contributors: list[Contributor], decision: Decision) -> str | None:
        """Return the peer whose contribution alone counts in a tensor with owners that is not merged."""
        if self._before is None or not spec.owners or spec.name in self._merged:
            return None
        accepted = self._verdict(spec, contributors, decision).accepted
        return contributors[accepted[0]].peer if len(accepted) == 1 else None

    def _sums_of(self, writer: SnapshotWriter, spec: TensorSpec) -> tuple[int, int]:
        """Return the digest's sums of a tensor as it was written."""
        digest = RoundDigest()
        for first, count in self._sources.blocks(spec, []):
            digest.add_range(spec.name, first, writer.read(spec.name, first, count))
        return digest.sums

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

    def _verdict(self, spec: TensorSpec, contributors: list[Contributor], decision: Decision) -> Verdict:
        """Return who counts in a tensor, by the place among the contributors, and with which weight."""
        places = [
            place
            for place, contributor in enumerate(contributors)
            if contributor.peer not in decision.rejected
            and (self._before is None or spec.is_trained_by(contributor.index))
        ]
        weight_of = {contributors[place].index: 1.0 for place in places}
        if decision.verdicts is not None:
            decided = decision.verdicts[judged_as(spec)]
            weight_of = dict(zip(decided.accepted, decided.weights, strict=True))
        accepted = tuple(place for place in places if contributors[place].index in weight_of)
        # What one peer has sent is taken as it is, to the last bit.
        weights = [1.0 if len(accepted) == 1 else weight_of[contributors[place].index] for place in accepted]
        return Verdict(accepted=accepted, weights=tuple(weights))


def _require_finite(spec: TensorSpec, values: torch.Tensor) -> None:
    """Let no round be committed that would break its peers: contributions are finite, so this is nobody's fault here.

    Raises:
        RuntimeError: a value is not finite.
    """
    # A product of finite values may overflow.
    if not math.isfinite(float(values.dot(values))) and not bool(torch.isfinite(values).all()):
        raise RuntimeError(f"the round would give tensor {spec.name!r} values that are not finite")


def _square(values: torch.Tensor) -> float:
    """Return the squared L2 norm of 1-D values, added up in fp64."""
    # Part by part: a copy of the whole in fp64 would be the largest thing in memory.
    norms = (float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in torch.split(values, 1 << 20))
    return sum(norm * norm for norm in norms)


def _divided(total: torch.Tensor, verdict: Verdict) -> torch.Tensor:
    """Return a weighted sum as the mean, in its memory."""
    divisor = sum(verdict.weights)
    return total if divisor == 1 else total.div_(divisor)


def _add(squares: _Squares, spec: TensorSpec, square: float) -> None:
    squares[judged_as(spec)] = squares.get(judged_as(spec), 0.0) + square
