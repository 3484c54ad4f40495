# SPDX-License-Identifier: Apache-2.0
"""Rounds whose messages are compressed, with error feedback in both directions.

Outward, a worker sends its pseudo-gradient plus what earlier messages lost (its residual). Homeward, an owner sends by
how much its anchor has moved away from the replica of it that all workers hold. The owner's anchor is exact: what a
message loses stays in the difference, and is part of the next one. All workers, the owner too, add what the message
says to their replicas, which so stay equal bit for bit, and continue from there.

Messages are coded tensor by tensor: one that tensor parallel ranks of a worker hold twice decodes to the same values
on all of them, whatever it is packed with. Copies on two pipeline stages also need a codec of their own, since their
tensors may be cut elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_ext.local_sgd.exchange.judge import Judge
from megatron_ext.local_sgd.exchange.owned import OwnedRuns
from megatron_ext.local_sgd.exchange.rounds import Decision, OwnedTerms, RoundState, decide_and_step
from megatron_ext.local_sgd.exchange.segment_memory import flattened
from megatron_ext.local_sgd.exchange.segments import SegmentPiece
from megatron_ext.local_sgd.reporting.round_report import RoundClock
from megatron_ext.outer.codecs.codec import Codec
from megatron_ext.outer.error_feedback import lost_in, wanted_of
from megatron_ext.transport.collectives import Exchange, ExchangeMemory

__all__ = ["CompressedRound"]


class CompressedRound:
    """Rounds with a codec, and the state that they need: replicas and residuals, 8 bytes per value."""

    def __init__(
        self, owned: OwnedRuns, judge: Judge, *, outward: Sequence[Codec], homeward: Sequence[Codec]
    ) -> None:
        """Prepare; `begin` comes before the first round.

        Args:
            owned: who owns what.
            judge: decides over the workers.
            outward: codecs of the pseudo-gradients, one per tensor.
            homeward: codecs of the anchors' moves, likewise.
        """
        self._owned = owned
        self._judge = judge
        self._out = outward
        self._home = homeward
        self.replicas: list[torch.Tensor] = []
        self.residuals: list[torch.Tensor] = []
        self._exchanges: list[Exchange] = []

    def begin(self, replicas: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor] | None = None) -> None:
        """Begin at anchors that all workers know.

        Args:
            replicas: like the values; copied.
            residuals: what this worker's earlier messages lost, like the values; copied. Nothing when None.
        """
        self.replicas = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in replicas]
        self.residuals = [torch.zeros_like(tensor) for tensor in self.replicas]
        for residual, saved in zip(self.residuals, residuals or [], strict=False):
            residual.copy_(saved)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends in a round."""
        sent = 0
        for segment in self._owned.segments:
            parts = [self._owned.pieces(segment, worker) for worker in range(self._owned.workers)]
            own = parts[self._owned.worker]
            sent += sum(_nbytes(self._out, part) for part in parts if part is not own)
            sent += _nbytes(self._home, own) * (self._owned.workers - 1)
        return sent

    def run(self, state: RoundState) -> list[Decision]:
        """Make a round.

        Raises:
            RuntimeError: a worker is non-finite, and is not to be left out.
        """
        self.start(state)
        decisions = self.turn(state)
        self.finish(state)
        return decisions

    def start(self, state: RoundState) -> None:
        """Start to send the owners what is theirs; what the messages lose is in the residuals from here on."""
        replicas, residuals = flattened(self.replicas), flattened(self.residuals)
        with state.clock.measure("applying"):
            idle = state.steps is not None and not state.steps[self._owned.worker]
            outward = self._outward(state.flats, replicas, residuals, keeps_residuals=idle)
            self._exchanges = [exchange.start() for exchange in outward]

    def turn(self, state: RoundState) -> list[Decision]:
        """Wait for what was sent, decide, make the outer step, and start to send the results back."""
        messages = [[data for _, terms in exchange.arrived() for data in terms] for exchange in self._exchanges]
        decisions, anchors = decide_and_step(self._owned, self._judge, state, lambda: self._each(messages, state.clock))
        with state.clock.measure("applying"):
            returning = self._homeward(anchors, flattened(self.replicas))
            self._exchanges = [exchange.return_own() for exchange in returning]
        return decisions

    def finish(self, state: RoundState) -> None:
        """Wait for the results."""
        replicas = flattened(self.replicas)
        for index, exchange in enumerate(self._exchanges):
            parts = exchange.finish()
            with state.clock.measure("applying"):
                self._take_in(index, parts, replicas)
        for flat, replica in zip(state.flats, replicas, strict=True):
            flat.copy_(replica)
        self._exchanges = []

    def _outward(
        self,
        values: list[torch.Tensor],
        replicas: list[torch.Tensor],
        residuals: list[torch.Tensor],
        *,
        keeps_residuals: bool,
    ) -> Iterator[Exchange]:
        """Yield for every segment the exchange of pseudo-gradients; what they lose stays in the residuals.

        Args:
            values: this worker's.
            replicas: what all workers have in common.
            residuals: what earlier messages have lost.
            keeps_residuals: leave those as they are, because no rank will take what is sent.
        """
        memory = ExchangeMemory()
        for index, segment in enumerate(self._owned.segments):
            parts = []
            for worker in range(self._owned.workers):
                messages = []
                for piece in self._owned.pieces(segment, worker):
                    at = slice(piece.start, piece.stop)
                    residual, codec = residuals[piece.index][at], self._out[piece.index]
                    wanted = wanted_of(replicas[piece.index][at], values[piece.index][at], residual)
                    message = codec.encode(wanted)
                    if not keeps_residuals:
                        lost_in(wanted, codec.decode(message, piece.numel), out=residual)
                        # A non-finite worker must not stay non-finite forever.
                        residual.nan_to_num_(0.0, 0.0, 0.0)
                    messages.append(message)
                parts.append(_joined(messages, replicas))
            yield self._exchange(index, parts, memory)

    def _homeward(self, anchors: dict[int, torch.Tensor], replicas: list[torch.Tensor]) -> Iterator[Exchange]:
        """Yield for every segment the exchange of what the anchors are ahead of their replicas."""
        own_messages: list[list[torch.Tensor]] = [[] for _ in self._owned.segments]
        for number, (index, run) in enumerate(self._owned.numbered):
            offset = 0
            for piece in run.pieces:
                ahead = anchors[number][offset : offset + piece.numel]
                ahead = ahead - replicas[piece.index][piece.start : piece.stop]
                own_messages[index].append(self._home[piece.index].encode(ahead))
                offset += piece.numel
        memory = ExchangeMemory()
        for index, segment in enumerate(self._owned.segments):
            parts = []
            for worker in range(self._owned.workers):
                if worker == self._owned.worker:
                    parts.append(_joined(own_messages[index], replicas))
                else:
                    size = _nbytes(self._home, self._owned.pieces(segment, worker))
                    parts.append(torch.empty(size, dtype=torch.uint8, device=replicas[0].device))
            yield self._exchange(index, parts, memory)

    def _take_in(self, index: int, parts: Sequence[torch.Tensor], replicas: list[torch.Tensor]) -> None:
        """Add to the replicas what their owners sent of a segment."""
        segment = self._owned.segments[index]
        for worker, data in enumerate(parts):
            for piece, values in _decoded(self._home, self._owned.pieces(segment, worker), data):
                replicas[piece.index][piece.start : piece.stop] += values

    def _exchange(self, index: int, parts: list[torch.Tensor], memory: ExchangeMemory) -> Exchange:
        owners = [[part] if part.numel() else [] for part in parts]
        return Exchange(index, parts, self._owned.group, memory, owners)

    def _each(self, messages: list[list[torch.Tensor]], clock: RoundClock) -> Iterator[OwnedTerms]:
        """Yield every run that this rank owns; the terms are all workers' pseudo-gradients."""
        offset, current = 0, -1
        for number, (index, run) in enumerate(self._owned.numbered):
            offset = offset if index == current else 0
            current = index
            size = _nbytes(self._out, run.pieces)
            with clock.measure("applying"):
                terms = [
                    torch.cat([values for _, values in _decoded(self._out, run.pieces, data[offset : offset + size])])
                    for data in messages[index]
                ]
            offset += size
            yield number, self._owned.segments[index].unit, terms


def _decoded(
    codecs: Sequence[Codec], pieces: Sequence[SegmentPiece], data: torch.Tensor
) -> Iterator[tuple[SegmentPiece, torch.Tensor]]:
    """Yield the values of pieces that were coded one after the other."""
    offset = 0
    for piece in pieces:
        codec = codecs[piece.index]
        size = codec.nbytes(piece.numel)
        yield piece, codec.decode(data[offset : offset + size], piece.numel)
        offset += size


def _nbytes(codecs: Sequence[Codec], pieces: Sequence[SegmentPiece]) -> int:
    return sum(codecs[piece.index].nbytes(piece.numel) for piece in pieces)


def _joined(messages: list[torch.Tensor], like: list[torch.Tensor]) -> torch.Tensor:
    """Return messages one after the other, perhaps none."""
    return torch.cat(messages) if messages else torch.empty(0, dtype=torch.uint8, device=like[0].device)
