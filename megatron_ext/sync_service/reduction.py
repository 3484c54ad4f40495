# SPDX-License-Identifier: Apache-2.0
"""What a round does to the values: contributions are measured, reduced and stepped by, tensor after tensor; then
experts may be merged.

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
from megatron_ext.sync_service.decision import Decision, Measured
from megatron_ext.sync_service.digest import RoundDigest
from megatron_ext.sync_service.failpoints import Failpoints
from megatron_ext.sync_service.frames import whole_box
from megatron_ext.sync_service.guards import Judged, judged_as
from megatron_ext.sync_service.merge import Merge
from megatron_ext.sync_service.refusal import Refusal
from megatron_ext.sync_service.snapshot import Snapshot, SnapshotWriter, state_name
from megatron_ext.sync_service.spool import Contribution
from megatron_ext.sync_service.updates import RESIDUAL, UPDATE, full, publish, publish_exactly

__all__ = ["LARGEST_NORM", "Alone", "Contributor", "DamagedContribution", "Made", "Reduction"]

LARGEST_NORM = 1e15
"""Of a tensor's pseudo-gradient: more is broken, though finite. Sums, momentum and the squares that Adam keeps of what
is below stay far from the end of fp32, so that a round's values are always finite."""

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


@dataclass(frozen=True, kw_only=True)
class Made:
    """What came of a round beside its values, which are in the snapshot."""

    sums: tuple[int, int]
    """Of the digest of the values."""

    outer_scalars: dict[str, float]
    """States of the outer optimizer that all tensors share."""

    as_uploaded: dict[str, str] = field(default_factory=dict)
    """By the names of tensors, whose contribution alone is what they have become."""


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
        before: Snapshot | None,
        outer_scalars: Mapping[str, float],
        failpoints: Failpoints,
        merge: Merge | None = None,
        alone: Alone | None = None,
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
        """
        self._catalog = catalog
        self._config = optimizer
        self._alone = alone
        self._is_exact = codec == "fp32" or before is None
        self._absolute = before is None or (codec == "fp32" and alone is None)
        self._codec = codec
        self._before = before
        self._scalars = dict(outer_scalars)
        self._failpoints = failpoints
        self._merge = merge
        self._merged = frozenset[str]() if merge is None else merge.names
        # What the optimizer keeps is known after a step, and the head of a snapshot wants it before the first one.
        tried = self._optimizer([torch.zeros(2)])
        tried.step(0, slice(0, 2), torch.ones(2))
        self._states = sorted(tried.tensor_state())
        self._is_fresh = bool(tried.scalar_state()) and not self._scalars

    def measure(self, contributors: list[Contributor]) -> list[Measured]:
        """Find out what the decision about the round needs.

        Args:
            contributors: in the order of their indices.

        Raises:
            DamagedContribution: one cannot be read.
        """
        scratch = _Scratch(max((spec.numel for spec in self._catalog), default=0))
        return [self._measured(contributor, scratch) for contributor in contributors]

    def common_squares(self, contributors: list[Contributor], decision: Decision) -> dict[Judged, float]:
        """Return the squared norms of the common pseudo-gradients of the units that all peers train.

        Args:
            contributors: in the order of their indices.
            decision: says who counts.

        Raises:
            DamagedContribution: one cannot be read.
        """
        squares: dict[Judged, float] = {}
        for spec in self._catalog:
            verdict = self._verdict(spec, contributors, decision)
            if spec.owners or not verdict.accepted:
                continue
            accepted = [contributors[place] for place in verdict.accepted]
            common = _mean(partial(self._gradient, spec), accepted, verdict)
            squares[judged_as(spec)] = squares.get(judged_as(spec), 0.0) + _square(common)
        return squares

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
        states = self._states if self._before is not None else []
        learned = {} if decision.learned is None else {"guards": decision.learned}
        metadata = {"format": "pt", "round": path.stem, **learned}
        if self._is_exact:
            writer = SnapshotWriter(path, self._catalog, states, metadata)
        else:
            writer = SnapshotWriter(path, self._catalog, [*states, RESIDUAL], metadata, [UPDATE])
        scalars = dict(self._scalars)
        as_uploaded: dict[str, str] = {}
        try:
            digest = RoundDigest()
            for spec in self._catalog:
                values, kept, stepped = self._reduced(spec, contributors, decision)
                _require_finite(spec, values)
                owner = self._sole_owner(spec, contributors, decision)
                if owner is not None and not (UPDATE in kept and bool(kept[UPDATE][0].isnan())):
                    as_uploaded[spec.name] = owner
                scalars = scalars if stepped is None else stepped
                if self._merge is None:
                    digest.add(spec.name, spec.shape, whole_box(spec.shape), values)
                writer.write(spec.name, values)
                for state, tensor in kept.items():
                    writer.write(state_name(state, spec.name), tensor)
                del values, kept  # they may be a contribution's memory
                self._failpoints.hit("tensor_reduced")
            if self._merge is not None:
                self._merge.run(writer, self._failpoints)
                for spec in self._catalog:
                    digest.add(spec.name, spec.shape, whole_box(spec.shape), writer.read(spec.name))
            writer.sync()
        except BaseException:
            writer.abandon()
            raise
        return writer, Made(sums=digest.sums, outer_scalars=scalars, as_uploaded=as_uploaded)

    def _measured(self, contributor: Contributor, scratch: _Scratch) -> Measured:
        nbytes = contributor.contribution.nbytes
        squares: dict[Judged, float] = {}
        for spec in self._catalog:
            if self._before is not None and not spec.is_trained_by(contributor.index):
                continue
            square = _square(self._gradient(spec, contributor, scratch))
            if not square <= LARGEST_NORM**2:
                return Measured(squares={}, broken=spec.name, nbytes=nbytes)
            squares[judged_as(spec)] = squares.get(judged_as(spec), 0.0) + square
        return Measured(squares=squares, nbytes=nbytes)

    def _reduced(
        self, spec: TensorSpec, contributors: list[Contributor], decision: Decision
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, float] | None]:
        """Return a tensor's new values, the states of its outer optimizer, and those that all share after a step."""
        verdict = self._verdict(spec, contributors, decision)
        accepted = [contributors[place] for place in verdict.accepted]
        if self._before is None:
            return self._values(spec, accepted[0]), {}, None
        if not spec.owners:
            return self._stepped(spec, accepted, verdict, decision)
        if self._absolute:
            return (_mean(partial(self._values, spec), accepted, verdict) if accepted else self._anchor(spec)), {}, None
        return *self._of_owners(spec, accepted, verdict), None

    def _sole_owner(self, spec: TensorSpec, contributors: list[Contributor], decision: Decision) -> str | None:
        """Return the peer whose contribution alone counts in a tensor with owners that is not merged."""
        if self._before is None or not spec.owners or spec.name in self._merged:
            return None
        accepted = self._verdict(spec, contributors, decision).accepted
        return contributors[accepted[0]].peer if len(accepted) == 1 else None

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
        self, spec: TensorSpec, accepted: list[Contributor], verdict: Verdict, decision: Decision
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, float] | None]:
        """Return a tensor that all peers train, after its outer step, and the states of the optimizer."""
        anchor = self._anchor(spec)
        if not self._is_exact and self._before is not None and state_name(RESIDUAL, spec.name) in self._before:
            anchor += self._before.read_checked(state_name(RESIDUAL, spec.name))
        optimizer = self._optimizer([anchor])
        if self._before is not None and not self._is_fresh:
            keys = {name: state_name(name, spec.name) for name in self._states}
            found = {name: [self._before.read_checked(key)] for name, key in keys.items() if key in self._before}
            optimizer.load(found, self._scalars)
        scalars = None
        coefficient = decision.coefficients.get(judged_as(spec), 1.0) if self._alone is None else self._alone.weight
        if accepted and self._config.outer_optimizer == "none" and self._absolute and coefficient == 1:
            # The mean itself, not the anchor minus the mean difference: one peer gets back what it sent.
            anchor = _mean(partial(self._values, spec), accepted, verdict)
        elif accepted:
            gradient = _mean(partial(self._gradient, spec), accepted, verdict)
            optimizer.step(0, slice(0, spec.numel), gradient.mul_(coefficient) if coefficient != 1 else gradient)
            scalars = optimizer.scalar_state()
        states = {name: tensors[0] for name, tensors in optimizer.tensor_state().items()}
        zeros = {name: torch.zeros(spec.numel) for name in self._states}
        kept = {**zeros, **states}
        if self._is_exact:
            return anchor, kept, scalars
        published = full(anchor) if spec.name in self._merged else publish(self._codec, self._anchor(spec), anchor)
        return published.values, {**kept, RESIDUAL: published.residual, UPDATE: published.update}, scalars

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

    def _anchor(self, spec: TensorSpec, out: torch.Tensor | None = None) -> torch.Tensor:
        assert self._before is not None
        return self._before.read_checked(spec.name, out=out)

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
