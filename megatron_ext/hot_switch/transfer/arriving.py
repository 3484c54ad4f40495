# SPDX-License-Identifier: Apache-2.0
"""A switch in flight: its rounds travel while what has arrived is used."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist

from megatron_ext.hot_switch.transfer.bound import BoundRound, BoundSwitch
from megatron_ext.hot_switch.transfer.itinerary import ROUNDS_IN_FLIGHT

__all__ = ["Arriving"]

Put = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
"""Put values (second) into tensors (first)."""


class Arriving:
    """Sends and receives the rounds of a switch, of which two are in flight at a time.

    A rank sends no later round before it has been asked for an earlier one's, so ranks that wait for each other in
    between (in a layer's all-reduce, say) must have asked for the same units before. Then whatever one of them still
    waits for, the others have sent.

    Attributes:
        seconds: this rank's time in here.
    """

    def __init__(self, bound: BoundSwitch, rounds_until: Mapping[str, int], put: Put) -> None:
        """Send the first rounds.

        Args:
            bound: the switch.
            rounds_until: by unit, the rounds after which all ranks have it; the same on all ranks.
            put: how values reach tensors.
        """
        self._rounds = bound.rounds
        self._staying: tuple[list[torch.Tensor], list[torch.Tensor]] | None = bound.stay_into, bound.stay_from
        self._rounds_until = rounds_until
        self._put = put
        self._on_the_way: deque[tuple[BoundRound, list[dist.Work]]] = deque()
        self._sent = self._arrived = 0
        self.seconds = 0.0
        start = time.perf_counter()
        self._send()
        self.seconds = time.perf_counter() - start

    @property
    def complete(self) -> bool:
        """Whether everything has arrived."""
        return self._arrived == len(self._rounds)

    def require(self, units: Iterable[str]) -> None:
        """Return when these units have arrived; a unit that does not move is there."""
        self._advance(max((self._rounds_until.get(unit, 0) for unit in units), default=0))

    def finish(self) -> None:
        """Return when everything has arrived. All ranks must call it in the end."""
        self._advance(len(self._rounds))

    @torch.no_grad()
    def _advance(self, rounds: int) -> None:
        start = time.perf_counter()
        # Another rank may have more rounds than this one.
        while self._arrived < min(rounds, len(self._rounds)):
            if self._sent == len(self._rounds):
                self._stay()  # while the last rounds travel
            bound, works = self._on_the_way.popleft()
            for work in works:
                work.wait()
            self._put(bound.unpack_into, bound.unpack_from)
            self._arrived += 1
            self._send()
        self._stay()
        self.seconds += time.perf_counter() - start

    def _stay(self) -> None:
        """Put in place what stays on this rank, once."""
        if self._staying is not None:
            self._put(*self._staying)
            self._staying = None

    @torch.no_grad()
    def _send(self) -> None:
        while self._sent < len(self._rounds) and len(self._on_the_way) < ROUNDS_IN_FLIGHT:
            bound = self._rounds[self._sent]
            if bound.pack_from:
                torch._foreach_copy_(bound.pack_into, bound.pack_from)
            works = dist.batch_isend_irecv(bound.operations) if bound.operations else []
            self._on_the_way.append((bound, works))
            self._sent += 1
