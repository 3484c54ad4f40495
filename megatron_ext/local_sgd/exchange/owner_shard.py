# SPDX-License-Identifier: Apache-2.0
"""The part of a round that an owner does: anchor, outer state and outer step of the elements that a rank owns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_ext.local_sgd.exchange.host_memory import HostMemory
from megatron_ext.outer.optimizers.base import OuterOptimizer
from megatron_ext.outer.penalty import Verdict
from megatron_ext.outer.reducers.reducer import Reducer, Sparsifier, TermOf
from megatron_ext.outer.weighted_sum import weighted_mean
from megatron_ext.transport.collectives import CACHED_NUMEL

__all__ = ["OuterShard", "Ranges", "TensorPart"]

Ranges = Sequence[tuple[int, int]]
"""(first element, one past the last) of parts of a run."""


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """A tensor, or a part of one, in a run."""

    start: int
    """Its first element in the run."""

    stop: int
    """One past its last element there."""

    tensor: str
    """The tensor's name."""

    first: int
    """Which element of the tensor the first one is."""

    is_counted: bool
    """Whether it counts in norms."""

    is_dense: bool
    """Whether it is not thinned out."""


class OuterShard:
    """What a rank owns, as runs of elements that are contiguous while they are exchanged.

    A run's `terms` are all workers' values of it, 1-D and in worker order, or their pseudo-gradients; `terms[worker]`
    is this rank's own memory, in which everything ends. Norms are added up as squares, fp64, without a word to other
    ranks.
    """

    def __init__(
        self,
        anchors: list[torch.Tensor],
        tensors: Sequence[Sequence[TensorPart]],
        *,
        optimizer: OuterOptimizer,
        reducer: Reducer,
        sparsifier: Sparsifier | None,
        worker: int,
        device: torch.device,
        terms_are_gradients: bool = False,
        averages: bool = False,
        host: HostMemory | None = None,
    ) -> None:
        """Take over the anchors.

        Args:
            anchors: fp32, 1-D, one per run; updated in place.
            tensors: what each run is made of.
            optimizer: the outer optimizer over the anchors.
            reducer: makes one pseudo-gradient of several.
            sparsifier: thins out every worker's pseudo-gradient of a tensor before they are reduced.
            worker: which worker this rank belongs to.
            device: where the terms are.
            terms_are_gradients: whether terms are pseudo-gradients instead of values.
            averages: whether the next anchor is the mean of the values itself, as without an outer optimizer: the
                anchor minus the common pseudo-gradient would be the same except for rounding.
            host: where anchors and outer state are between their steps; on the device when None.
        """
        self.anchors = anchors
        self.optimizer = optimizer
        self._tensors = tensors
        self._counted: Sequence[Ranges] = [
            [(part.start, part.stop) for part in parts if part.is_counted] for parts in tensors
        ]
        self._reducer = reducer
        self._sparsifier = sparsifier
        self._worker = worker
        self._terms_are_gradients = terms_are_gradients
        self._averages = averages
        self._host = host
        longest = max((anchor.numel() for anchor in anchors), default=1)
        cached = device.type == "cpu"
        self._elementwise_numel = min(longest, CACHED_NUMEL) if cached else longest
        self._step_numel = self._elementwise_numel if optimizer.elementwise else longest
        self._scratch = torch.empty(0, dtype=torch.float32, device=device)
        self._overlap: torch.Tensor | None = None

    def prepare(self, overlap: torch.Tensor | None = None, options: Mapping[str, float] | None = None) -> None:
        """Take the memory that a round works in, and what its outer step is made with.

        Args:
            overlap: fp64, (2,), to which steps add the inner product of pseudo-gradient and momentum, and the squared
                norm of the momentum.
            options: of the outer optimizer, those that change from round to round.
        """
        if options:
            self.optimizer.change(options)
        self._scratch = self._scratch.new_empty(2, max(self._elementwise_numel, self._step_numel))
        self._overlap = overlap

    def release(self) -> None:
        """Give that memory back."""
        self._scratch = self._scratch.new_empty(0)
        if self._host is not None:
            self._host.settle()

    def mean_step(self, run: int, terms: list[torch.Tensor], squares: torch.Tensor) -> None:
        """Make the whole step by the plain mean, in one pass.

        Args:
            run: its number.
            terms: see the class.
            squares: (workers + 1,), to which the squared norms of all pseudo-gradients and of their mean are added.
        """
        with self._here(run, changed=True):
            for start, part in self._parts(run, self._step_numel):
                mean = weighted_mean(self._measured(run, start, part, terms, squares), [1.0] * len(terms))
                self._add_result(squares[-1], mean, run, start, part)
                self._add_overlap(run, start, part, mean)
                self._move(run, part, mean, 1.0)
                terms[self._worker][part] = self.anchors[run][part]

    def _measured(
        self, run: int, start: int, part: slice, terms: list[torch.Tensor], squares: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Yield what is reduced of part of a run, all but the first in the same memory, and add up the norms."""
        anchor = self.anchors[run][part]
        for worker, term in enumerate(terms):
            scratch = self._scratch[min(worker, 1), : anchor.numel()]
            gradient = torch.sub(anchor, term[part], out=scratch)
            self.add_square(squares[worker], gradient, run, start)
            yield scratch.copy_(term[part]) if self._averages else gradient

    def _add_result(self, square: torch.Tensor, common: torch.Tensor, run: int, start: int, part: slice) -> None:
        """Add the squared norm of the common pseudo-gradient to `square`; uses up the second half of the scratch."""
        if self._averages:
            common = torch.sub(self.anchors[run][part], common, out=self._scratch[1, : common.numel()])
        self.add_square(square, common, run, start)

    def _move(self, run: int, part: slice, common: torch.Tensor, coefficient: float) -> None:
        """Make the outer step of part of a run, given what was reduced, which is used up."""
        anchor = self.anchors[run][part]
        if self._averages and coefficient == 1:
            anchor.copy_(common)
            return
        gradient = torch.sub(anchor, common, out=common) if self._averages else common
        self.optimizer.step(run, part, gradient.mul_(coefficient) if coefficient != 1 else gradient)

    def measure(self, run: int, terms: list[torch.Tensor], squares: torch.Tensor) -> None:
        """Add the squared norms of all workers' pseudo-gradients to `squares`, (workers,)."""
        with self._anchor_here(run):
            for start, part in self._parts(run, self._elementwise_numel):
                for worker, term in enumerate(terms):
                    self.add_square(squares[worker], self._gradient(run, part, term, self._scratch[1]), run, start)

    def subtract(self, run: int, own: torch.Tensor, out: torch.Tensor) -> None:
        """Put the pseudo-gradient of this rank's own values of a run into `out`."""
        with self._anchor_here(run):
            torch.sub(self.anchors[run], own, out=out)

    def reduce(
        self, run: int, terms: list[torch.Tensor], verdict: Verdict, square: torch.Tensor, number: int
    ) -> None:
        """Put the common pseudo-gradient, or the mean of the values, in the place of this rank's own term.

        Args:
            run: its number.
            terms: see the class.
            verdict: which workers count, and how much.
            square: to which the squared norm of the result is added.
            number: of the round.
        """
        own = terms[self._worker]
        if not verdict.accepted:
            own.zero_()
            return
        with self._anchor_here(run):
            for start, part, of in self._reduced_parts(run):
                gradients = [self._term(run, part, terms[worker]) for worker in verdict.accepted]
                if self._sparsifier is not None and of is not None and not of.is_dense:
                    gradients = [
                        self._sparsifier(
                            gradient, TermOf(round=number, tensor=of.tensor, first=of.first, worker=worker)
                        )
                        for gradient, worker in zip(gradients, verdict.accepted, strict=True)
                    ]
                own[part] = self._reducer(gradients, verdict.weights)
                self._add_result(square, own[part], run, start, part)

    def _term(self, run: int, part: slice, term: torch.Tensor) -> torch.Tensor:
        """Return what is reduced of part of a term, in new memory unless the term is a pseudo-gradient."""
        return term[part].clone() if self._averages else self._gradient(run, part, term)

    def _gradient(self, run: int, part: slice, term: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the pseudo-gradient in part of a term, in `out` if that is given and needed."""
        if self._terms_are_gradients:
            return term[part]
        anchor = self.anchors[run][part]
        return torch.sub(anchor, term[part], out=None if out is None else out[: anchor.numel()])

    def _reduced_parts(self, run: int) -> Iterator[tuple[int, slice, TensorPart | None]]:
        """Yield (start, slice) of what is reduced at once, and what it is where that matters."""
        if self._sparsifier is None:
            yield from ((start, part, None) for start, part in self._parts(run, self._elementwise_numel))
        else:
            # Tensor by tensor: one that the ranks of a worker hold twice must lose the same elements on all of them,
            # whatever it is packed with.
            yield from ((of.start, slice(of.start, of.stop), of) for of in self._tensors[run])

    def step(self, run: int, own: torch.Tensor, coefficient: float | None) -> None:
        """Move the anchor by what `reduce` has made, and put it in the place of that.

        Args:
            run: its number.
            own: what `reduce` left in this rank's own term.
            coefficient: multiplies the pseudo-gradient; None leaves the anchor and the outer state as they are.
        """
        with self._here(run, changed=coefficient is not None):
            for start, part in self._parts(run, self._step_numel):
                anchor = self.anchors[run][part]
                self._add_overlap(run, start, part, own[part])
                if coefficient is not None:
                    self._move(run, part, own[part], coefficient)
                own[part] = anchor

    def _here(self, run: int, *, changed: bool) -> contextlib.AbstractContextManager[None]:
        """Have anchor and outer state of a run on the device, and those of the next run on the way there."""
        if self._host is None:
            return contextlib.nullcontext()
        visitors = self._stateful(run)
        return self._host.visit(
            visitors,
            changed=changed,
            following=self._stateful(run + 1) if run + 1 < len(self.anchors) else [],
            new=lambda: self._stateful(run)[len(visitors) :],
        )

    def _stateful(self, run: int) -> list[torch.Tensor]:
        return [self.anchors[run], *self.optimizer.states(run)]

    def _anchor_here(self, run: int) -> contextlib.AbstractContextManager[None]:
        """Have the anchor of a run on the device, to look at, and that of the next run on the way there."""
        if self._host is None or self._terms_are_gradients:
            return contextlib.nullcontext()
        return self._host.visit([self.anchors[run]], changed=False, following=self.anchors[run + 1 : run + 2])

    def _parts(self, run: int, length: int) -> Iterator[tuple[int, slice]]:
        """Yield (start, slice) of the parts of a run to work on one after the other."""
        numel = self.anchors[run].numel()
        for start in range(0, numel, length):
            yield start, slice(start, min(start + length, numel))

    def add_square(self, total: torch.Tensor, part: torch.Tensor, run: int, start: int) -> None:
        """Add to `total` the squared norm of those elements of `part` that count; it is at `start` of the run."""
        for first, last in self._counted[run]:
            within = part[max(first - start, 0) : max(last - start, 0)]
            total += within.dot(within)

    def _add_overlap(self, run: int, start: int, part: slice, gradient: torch.Tensor) -> None:
        """Compare a pseudo-gradient with the momentum that it is about to change, over the elements that count."""
        if self._overlap is None:
            return
        momentum = self.optimizer.momentum(run, part)
        if momentum is None:
            return
        for first, last in self._counted[run]:
            within = slice(max(first - start, 0), max(last - start, 0))
            self._overlap[0] += gradient[within].dot(momentum[within])
            self._overlap[1] += momentum[within].dot(momentum[within])
