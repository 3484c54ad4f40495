# SPDX-License-Identifier: Apache-2.0
"""One tensor of a round: contributions are measured, added up and stepped by, block by block."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.optimizers.base import OuterOptimizer
from megatron_ext.outer.outer_optimizer import averages_values, build_outer_optimizer
from megatron_ext.outer.penalty import Verdict
from megatron_ext.outer.reducer_config import GTAConfig
from megatron_ext.outer.reducers.linear import Linear
from megatron_ext.outer.reducers.reducer import Reducer, TermOf
from megatron_ext.sync_service.disk.snapshot import CheckedRead, Snapshot
from megatron_ext.sync_service.disk.snapshot_names import state_name
from megatron_ext.sync_service.disk.snapshot_writer import SnapshotWriter
from megatron_ext.sync_service.protocol.catalog import TensorSpec
from megatron_ext.sync_service.protocol.round_digest import RoundDigest
from megatron_ext.sync_service.values.blocks import Block
from megatron_ext.sync_service.values.reused_memory import ReusedMemory
from megatron_ext.sync_service.values.sources import Contributor, Sources
from megatron_ext.sync_service.values.updates import EXACT, RESIDUAL, UPDATE, full, publish, publish_exactly

__all__ = ["LARGEST_NORM", "TensorMade", "TensorRound", "UnusableContribution", "square_of"]

LARGEST_NORM = 1e15
"""Of a tensor's pseudo-gradient: more is unusable, though finite. Sums, momentum and the squares that Adam keeps of
what is below stay far from the end of fp32, so that a round's values are always finite."""


_LARGE_ELEMENTS = 1 << 20
"""More than that is in a block only where the peers' layouts or the outer optimizer do not let it be smaller."""

_SQUARED_ELEMENTS = 1 << 16
"""Of which the sum of squares is taken at a time."""


class UnusableContribution(Exception):
    """A contribution is non-finite, or far too large."""


class _Whole(Exception):
    """A tensor cannot be made block by block."""


@dataclass
class TensorMade:
    """What came of a tensor beside its values."""

    sums: tuple[int, int] = (0, 0)
    """Of the digest of its values."""

    squares: dict[int, float] = field(default_factory=dict)
    """Squared norms of the pseudo-gradients, by the place of the contributor."""

    scalars: dict[str, float] | None = None
    """States of the outer optimizer that all tensors share; None where there was no step."""

    is_coded: bool = True
    """Whether a lossy codec can say what was added."""


class TensorRound:
    """Makes the new values of tensors. Several threads may, of a tensor each."""

    def __init__(
        self,
        optimizer: OuterOptimizerConfig,
        *,
        codec: str,
        result_codec: str = "",
        reducing: GTAConfig | None = None,
        before: Snapshot | None,
        outer_scalars: Mapping[str, float],
        per_step: int | None,
        merged: frozenset[str],
        number: int = 0,
    ) -> None:
        """Prepare.

        Args:
            optimizer: the outer optimizer.
            codec: of the contributions: values with fp32 in rounds of several, else pseudo-gradients.
            result_codec: of what is published; that of the contributions unless given.
            reducing: how pseudo-gradients become one; their weighted mean unless given.
            before: the last round; None at the start, which has no pseudo-gradients.
            outer_scalars: of the last round.
            per_step: how many contributions make up one outer step, given where the round is one contribution's alone,
                which is a pseudo-gradient with any codec.
            merged: names of what is merged afterwards.
            number: of the round; at the start, 0, there is no outer step.
        """
        self.is_exact = codec == "fp32" or before is None
        self._config = optimizer
        self._number = number
        self._options = optimizer.options_of_round(number)
        self._per_step = per_step
        self._codec = result_codec or codec
        reducing = GTAConfig() if reducing is None else reducing
        self._averages = averages_values(optimizer, reducing)
        self._reducer = reducing.build()
        self._sparsifier = self._reducer.sparsifier
        self._before = before
        self._scalars = dict(outer_scalars)
        self._merged = merged
        self._memory = ReusedMemory()
        self._one_large = threading.Lock()
        # What the optimizer keeps is known after a step, and the head of a snapshot wants it before the first one.
        tried = self._optimizer([torch.zeros(2)])
        tried.step(0, slice(0, 2), torch.ones(2))
        self.states = sorted(tried.tensor_state())
        self._is_fresh = bool(tried.scalar_state()) and not self._scalars
        absolute = before is None or (codec == "fp32" and per_step is None)
        by_blocks = tried.elementwise and self._sparsifier is None  # which looks at a tensor as a whole
        self.sources = Sources(codec, before, absolute=absolute, by_blocks=by_blocks)

    def make(
        self,
        writer: SnapshotWriter,
        spec: TensorSpec,
        contributors: list[Contributor],
        verdict: Verdict,
        coefficient: float,
        *,
        measures: bool,
    ) -> TensorMade:
        """Write a tensor's new values and the states that belong to it.

        Args:
            writer: of the snapshot.
            spec: the tensor.
            contributors: in the order of their indices.
            verdict: which of them count, by their place, and with which weights.
            coefficient: what the common pseudo-gradient is multiplied by; of what has owners, that of a contribution
                which comes alone.
            measures: whether to measure the pseudo-gradients of all that train the tensor.

        Raises:
            UnusableContribution: a pseudo-gradient that is measured is non-finite, or far too large.
            DamagedContribution: a contribution cannot be read.
            OSError: the snapshot cannot be written, or the last one is damaged.
        """
        trained = [
            place
            for place, contributor in enumerate(contributors)
            if self._before is None or spec.is_trained_by(contributor.index)
        ]
        involved = sorted({*verdict.accepted, *(trained if measures else [])})
        blocks = self.sources.blocks(spec, [contributors[place] for place in involved])
        work = (writer, spec, contributors, verdict, coefficient, involved if measures else [])
        try:
            with self._alone_if_large(blocks):
                return self._by_blocks(blocks, *work)
        except _Whole:
            whole = [(0, spec.numel)]
            with self._alone_if_large(whole):
                return self._by_blocks(whole, *work)

    @contextmanager
    def _alone_if_large(self, blocks: list[Block]) -> Iterator[None]:
        """Let no two threads have memory for large blocks at a time."""
        if max(count for _, count in blocks) <= _LARGE_ELEMENTS:
            yield
            return
        with self._one_large:
            try:
                yield
            finally:
                self._memory.give_up()
                self.sources.give_up()

    def _by_blocks(
        self,
        blocks: list[Block],
        writer: SnapshotWriter,
        spec: TensorSpec,
        contributors: list[Contributor],
        verdict: Verdict,
        coefficient: float,
        measured: list[int],
    ) -> TensorMade:
        made, digest, sources = TensorMade(squares=dict.fromkeys(measured, 0.0)), RoundDigest(), self.sources
        takes_values = self._takes_values(spec, verdict)
        reader = sources.checked(spec.name)
        readers = {
            name: found
            for name in ([] if spec.owners else [*self.states, EXACT, RESIDUAL])
            if (found := sources.checked(state_name(name, spec.name))) is not None
        }
        for at in blocks:
            anchor = sources.anchor(reader, at)
            terms = self._terms(spec, at, anchor, contributors, verdict, made.squares, takes_values)
            total = self._reduced(spec, terms, verdict, takes_values) if verdict.accepted else None
            for _ in terms:
                raise AssertionError("there are more terms than weights")  # what is only measured is not a term
            kept: dict[str, torch.Tensor] = {}
            if anchor is None:
                assert total is not None
                values = total
            elif spec.owners:
                values, kept = self._of_owners(spec, anchor, total, takes_values, coefficient)
            else:
                before = {
                    name: found.read(*at, out=self._memory(f"state {name}", at[1])) for name, found in readers.items()
                }
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

    def _terms(
        self,
        spec: TensorSpec,
        at: Block,
        anchor: torch.Tensor | None,
        contributors: list[Contributor],
        verdict: Verdict,
        squares: dict[int, float],
        takes_values: bool,
    ) -> Iterator[torch.Tensor]:
        """Yield what is to be added up of a block, all but the first in the same memory, and measure what is asked for.

        Args:
            spec: the tensor.
            at: the block.
            anchor: the last round's values of it.
            contributors: in the order of their indices.
            verdict: which of them count, by their place.
            squares: by the place of who is measured, to which the squared norm of the pseudo-gradient is added.
            takes_values: whether values are added up, not pseudo-gradients.

        Raises:
            UnusableContribution: a pseudo-gradient that is measured is non-finite, or far too large.
            DamagedContribution: a contribution cannot be read.
        """
        sources, is_first = self.sources, True
        for place in sorted({*squares, *verdict.accepted}):
            uploaded = term = sources.uploaded(spec, contributors[place], at)
            if place in squares or not takes_values:
                term = sources.gradient(anchor, uploaded)
            if place in squares:
                squares[place] += square_of(term)
                if not squares[place] <= LARGEST_NORM**2:
                    raise UnusableContribution
            if place in verdict.accepted:
                if takes_values:
                    term = sources.values(anchor, uploaded)
                elif self._sparsifier is not None and self._before is not None and not spec.owners:
                    of = TermOf(round=self._number, tensor=spec.name, first=0, worker=contributors[place].index)
                    term = self._sparsifier(term, of)
                yield self._memory("total", term.numel()).copy_(term) if is_first else term
                is_first = False

    def _takes_values(self, spec: TensorSpec, verdict: Verdict) -> bool:
        """Return whether a tensor's new values are the mean of the values that were uploaded."""
        if self._before is None:
            return True
        if self._per_step is not None:
            return False
        if spec.owners:
            # What is to be merged, or a mean for whose rest there is no place, is sent as it is.
            return self.sources.absolute or spec.name in self._merged or len(verdict.accepted) > 1
        # The mean itself, not the anchor minus the mean difference: one peer gets back what it sent.
        return self.sources.absolute and self._averages

    def _of_owners(
        self, spec: TensorSpec, anchor: torch.Tensor, total: torch.Tensor | None, takes_values: bool, coefficient: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return what peers hold of a tensor with owners after what these have sent, and the update."""
        if self.sources.absolute:
            return anchor if total is None else total, {}
        if takes_values:
            # Sent as it is also where nobody who counts has it: a merge makes something else of it nevertheless.
            published = full(self._codec, anchor if total is None else total)
            return published.values, {UPDATE: published.update}
        step = torch.zeros_like(anchor) if total is None else total.mul_(-coefficient)
        if self.is_exact:
            return anchor + step, {}
        # A part of what was coded cannot be coded again without loss, and a merge makes something else of it.
        if spec.name in self._merged or (total is not None and coefficient != 1):
            published = full(self._codec, anchor + step)
        else:
            published = publish_exactly(self._codec, anchor, step)
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
        if takes_values and (total is None or coefficient == 1):
            return anchor if total is None else total, {}, None
        moved = self._memory("moved", anchor.numel()).copy_(before.get(EXACT, anchor))
        if RESIDUAL in before:
            moved += before[RESIDUAL]
        optimizer = self._optimizer([moved])
        if not self._is_fresh:
            optimizer.load({name: [before[name]] for name in self.states if name in before}, self._scalars)
        scalars = None
        if total is not None:
            gradient = torch.sub(anchor, total, out=total) if takes_values else total
            gradient = gradient.mul_(coefficient) if coefficient != 1 else gradient
            optimizer.step(0, slice(0, moved.numel()), gradient)
            scalars = optimizer.scalar_state()
        states = {name: tensors[0] for name, tensors in optimizer.tensor_state().items()}
        zeros = {name: torch.zeros_like(anchor) for name in self.states if name not in states}
        kept = {**zeros, **states}
        if self.is_exact:
            return moved, kept, scalars
        is_merged = spec.name in self._merged
        published = full(self._codec, moved) if is_merged else publish(self._codec, anchor, moved)
        return published.values, {**kept, EXACT: published.exact, UPDATE: published.update}, scalars

    def common(
        self, spec: TensorSpec, at: Block, reader: CheckedRead | None, contributors: list[Contributor], verdict: Verdict
    ) -> torch.Tensor:
        """Return the common pseudo-gradient of a block, of those who count, at least one.

        Raises:
            DamagedContribution: a contribution cannot be read.
        """
        anchor, takes_values = self.sources.anchor(reader, at), self._takes_values(spec, verdict)
        terms = self._terms(spec, at, anchor, contributors, verdict, {}, takes_values)
        total = self._reduced(spec, terms, verdict, takes_values)
        return total if anchor is None or not takes_values else torch.sub(anchor, total, out=total)

    def _reduced(
        self, spec: TensorSpec, terms: Iterator[torch.Tensor], verdict: Verdict, takes_values: bool
    ) -> torch.Tensor:
        """Return what several terms become, of which all but the first are in the same memory."""
        reducer: Reducer = Linear() if takes_values or spec.owners else self._reducer
        return reducer(terms if reducer.streams else [term.clone() for term in terms], verdict.weights)

    def _optimizer(self, anchors: list[torch.Tensor]) -> OuterOptimizer:
        if self._per_step is None:
            made = build_outer_optimizer(self._config, anchors)
            if self._options:
                made.change(self._options)
            return made
        return self._config.kind.of_contributions(anchors, count=self._per_step, **self._config.arguments)


def _require_finite(spec: TensorSpec, values: torch.Tensor) -> None:
    """Let no round be committed that would spoil its peers: contributions are finite, so this is nobody's fault here.

    Raises:
        RuntimeError: a value is non-finite.
    """
    # A product of finite values may overflow.
    if not math.isfinite(float(values.dot(values))) and not bool(torch.isfinite(values).all()):
        raise RuntimeError(f"the round would give tensor {spec.name!r} non-finite values")


def square_of(values: torch.Tensor) -> float:
    """Return the squared L2 norm of 1-D values, added up in fp64: the same to 1e-9 whatever the blocks."""
    # Parts that stay in a processor's cache, no smaller: between two operations the threads of a round wait for each
    # other, for Python's lock.
    wide, total = torch.empty(min(values.numel(), _SQUARED_ELEMENTS), dtype=torch.float64), 0.0
    for part in torch.split(values, _SQUARED_ELEMENTS):
        copy = wide[: part.numel()].copy_(part)
        total += float(copy.dot(copy))
    return total
