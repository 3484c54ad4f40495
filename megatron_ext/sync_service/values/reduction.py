# SPDX-License-Identifier: Apache-2.0
"""What a round does to the values: contributions are measured, reduced and stepped by, tensor after tensor; then
experts may be merged.

Everything is read from the disk and written to it, block by block, so that memory holds a few blocks whatever the
number of peers, and a round that fails halfway has changed nothing. Peers come in the order of their indices: who
uploaded first changes no bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.penalty import Verdict
from megatron_ext.outer.reducer_config import GTAConfig
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.disk.snapshot_names import state_name
from megatron_ext.sync_service.disk.snapshot_writer import SnapshotWriter
from megatron_ext.sync_service.disk.spares import SpareFiles
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.round_digest import RoundDigest
from megatron_ext.sync_service.values.decision import Decision, Measured
from megatron_ext.sync_service.values.failpoints import Failpoints
from megatron_ext.sync_service.values.guards import Judged
from megatron_ext.sync_service.values.merge import Merge
from megatron_ext.sync_service.values.sources import Contributor, DamagedContribution
from megatron_ext.sync_service.values.tensor_round import (
    LARGEST_NORM,
    TensorMade,
    TensorRound,
    UnusableContribution,
    square_of,
)
from megatron_ext.sync_service.values.updates import EXACT, UPDATE, kept_as

__all__ = ["LARGEST_NORM", "Contributor", "DamagedContribution", "Made", "Reduction"]

_MOST_THREADS = 4
"""Which make tensors at a time. More would wait for memory and disk."""

_Squares = dict[Judged, float]
"""Squared norms by what is judged as one."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """What came of a round beside its values, which are in the snapshot."""

    sums: tuple[int, int]
    """Of the digest of the values."""

    outer_scalars: dict[str, float]
    """States of the outer optimizer that all tensors share."""

    as_uploaded: dict[str, str] = field(default_factory=dict)
    """By the names of tensors, whose contribution alone is what they have become."""


class Reduction:
    """One round's work."""

    def __init__(
        self,
        catalog: Catalog,
        optimizer: OuterOptimizerConfig,
        *,
        codec: str,
        result_codec: str = "",
        reducing: GTAConfig | None = None,
        before: Snapshot | None,
        outer_scalars: Mapping[str, float],
        failpoints: Failpoints,
        merge: Merge | None = None,
        per_step: int | None = None,
        spares: SpareFiles | None = None,
        record_bytes: int = 0,
        number: int = 0,
    ) -> None:
        """Prepare.

        Args:
            catalog: the tensors.
            optimizer: the outer optimizer.
            codec: of the contributions: values with fp32 in rounds of several, else pseudo-gradients.
            result_codec: of what is published; that of the contributions unless given.
            reducing: how pseudo-gradients become one; their weighted mean unless given.
            before: the last round; None at the start, which has no pseudo-gradients.
            outer_scalars: of the last round.
            failpoints: where to die in tests.
            merge: what is done to the experts at the end; None for nothing.
            per_step: how many contributions make up one outer step, given where the round is one contribution's alone,
                which is a pseudo-gradient with any codec.
            spares: has a file for the snapshot to be written over, perhaps.
            record_bytes: about how long the record in the snapshot will be.
            number: of the round, for what of the outer optimizer changes from round to round.
        """
        self._spares = spares
        self._record_bytes = record_bytes
        self._catalog = catalog
        self._per_step = per_step
        self._codec = result_codec or codec
        self._before = before
        self._scalars = dict(outer_scalars)
        self._failpoints = failpoints
        self._merge = merge
        self._merged = frozenset[str]() if merge is None else merge.names
        self._tensors = TensorRound(
            optimizer,
            codec=codec,
            result_codec=result_codec,
            reducing=reducing,
            before=before,
            outer_scalars=outer_scalars,
            per_step=per_step,
            merged=self._merged,
            number=number,
        )
        self._sources = self._tensors.sources

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
            square = sum(map(square_of, self._sources.gradients(spec, contributor)))
            if not square <= LARGEST_NORM**2:
                return Measured(squares={}, unusable=spec.name, nbytes=nbytes)
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
                common = self._tensors.common(spec, at, reader, contributors, verdict)
                _add(squares, spec, square_of(common))
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
            What `measure` and `write` return; None for the latter where a contribution is unusable.

        Raises:
            DamagedContribution: one cannot be read.
            OSError: the snapshot cannot be written; nothing of it is left.
        """
        squares: list[_Squares] = [{} for _ in contributors]
        try:
            written = self._written(path, contributors, Decision(), squares)
        except UnusableContribution:
            return self.measure(contributors), None
        found = zip(contributors, squares, strict=True)
        return [Measured(squares=own, nbytes=entry.contribution.nbytes) for entry, own in found], written

    def _written(
        self, path: Path, contributors: list[Contributor], decision: Decision, squares: list[_Squares] | None
    ) -> tuple[SnapshotWriter, Made]:
        """Make the round's values, and measure every contribution where there is a place for what comes of it.

        Raises:
            UnusableContribution: one is, while it is measured.
        """
        writer = self._writer(path, decision)
        scalars, sums = dict(self._scalars), dict[str, tuple[int, int]]()
        as_uploaded: dict[str, str] = {}

        def make(spec: TensorSpec) -> tuple[TensorMade, Verdict]:
            verdict = self._verdict(spec, contributors, decision)
            coefficient = self._coefficient(spec, contributors, decision)
            measures = squares is not None
            return self._tensors.make(writer, spec, contributors, verdict, coefficient, measures=measures), verdict

        try:
            for spec, (made, verdict) in zip(self._catalog, _in_threads(make, self._catalog), strict=True):
                for place, square in made.squares.items():
                    assert squares is not None
                    _add(squares[place], spec, square)
                is_taken = self._before is not None and self._per_step is None and spec.owners
                if is_taken and spec.name not in self._merged and made.is_coded and len(verdict.accepted) == 1:
                    as_uploaded[spec.name] = contributors[verdict.accepted[0]].peer
                scalars = scalars if made.scalars is None else made.scalars
                sums[spec.name] = made.sums
                self._failpoints.hit("tensor_reduced")
            if self._merge is not None:
                self._merge.run(writer, self._failpoints)
                self._keep_merged(writer)
                sums |= {name: self._sums_of(writer, self._catalog[name]) for name in self._merged}
            writer.sync()
        except BaseException:  # whatever it is, no half snapshot stays
            writer.abandon()
            raise
        return writer, Made(sums=RoundDigest(sums.values()).sums, outer_scalars=scalars, as_uploaded=as_uploaded)

    def _keep_merged(self, writer: SnapshotWriter) -> None:
        """Let the next outer step begin with the experts as they were merged."""
        shared = [] if self._tensors.is_exact else [spec for spec in self._catalog if not spec.owners]
        for spec in shared:
            if spec.name in self._merged:
                for first, count in self._sources.blocks(spec, []):
                    writer.overwrite(state_name(EXACT, spec.name), first, writer.read(spec.name, first, count))

    def _writer(self, path: Path, decision: Decision) -> SnapshotWriter:
        states = self._tensors.states if self._before is not None else []
        learned = {} if decision.learned is None else {"guards": decision.learned}
        metadata = {"format": "pt", "round": path.stem, **learned}
        of_all = {} if self._tensors.is_exact else {UPDATE: kept_as(self._codec)}
        if of_all:
            states = [*states, EXACT]
        room = self._record_bytes
        return SnapshotWriter(path, self._catalog, states, metadata, of_all, spares=self._spares, record_bytes=room)

    def _coefficient(self, spec: TensorSpec, contributors: list[Contributor], decision: Decision) -> float:
        if not spec.owners:
            return decision.coefficients.get(spec.judged_as, 1.0)
        if self._per_step is None or decision.verdicts is None:
            return 1.0
        (contributor,) = contributors
        verdict = decision.verdicts[spec.judged_as]
        counts = contributor.index in verdict.accepted and contributor.index in spec.owners
        return verdict.part_of(contributor.index, spec.owners) if counts else 1.0

    def _sums_of(self, writer: SnapshotWriter, spec: TensorSpec) -> tuple[int, int]:
        """Return the digest's sums of a tensor as it was written."""
        digest = RoundDigest()
        for first, count in self._sources.blocks(spec, []):
            digest.add_range(spec.name, first, writer.read(spec.name, first, count))
        return digest.sums

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
            decided = decision.verdicts[spec.judged_as]
            if spec.owners:
                # Judged as one were all owners in the unit, of which this tensor may have some.
                decided = decided.among(weight_of)
            weight_of = dict(zip(decided.accepted, decided.weights, strict=True))
        accepted = tuple(place for place in places if contributors[place].index in weight_of)
        weights = tuple(weight_of[contributors[place].index] for place in accepted)
        return Verdict(accepted=accepted, weights=weights)


def _in_threads[T, R](work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield what comes of items, in their order; several are worked on at a time. One that fails ends the others."""
    count, torchs = min(_MOST_THREADS, len(os.sched_getaffinity(0))), torch.get_num_threads()
    # Each a core's work: a product of vectors would otherwise start as many threads again, which wait by spinning.
    pool = ThreadPoolExecutor(count, "reduction", torch.set_num_threads, (1,))
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(torchs)  # which is the process's, for threads that are still to begin


def _add(squares: _Squares, spec: TensorSpec, square: float) -> None:
    squares[spec.judged_as] = squares.get(spec.judged_as, 0.0) + square
