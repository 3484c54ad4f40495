# SPDX-License-Identifier: Apache-2.0
"""A peer of a simulated sync service: what it does, and where its time goes."""

from __future__ import annotations

import math

from megatron_ext.simulate.time_ledger import CAUSES, Cause
from megatron_ext.sync_service.protocol.report import Progress

__all__ = ["ServicePeer"]


class ServicePeer:
    """Where a peer is. Its time has a cause while it waits; training gets one when its contribution counts or is lost.

    Attributes:
        index: of the peer.
        name: of the peer.
        base: the round whose values its interval began with.
        place: how far its training was then.
        life: which process of the peer this is; what an earlier one had planned is void.
        alive: whether that process has started.
        gone_from: when the server knows that it has not; infinity while it is alive, or where it sends no heartbeats.
        repeating: whether it makes an interval again whose contribution is on record.
        applied: whether the round of the interval before is done, so that this one may end.
        awaited: whether a contribution of it is on record, whose round is not made.
        in_flight: steps and seconds of the contribution that is sent or awaited; None without one.
        made: steps and seconds of the interval that has begun, with what has been begun of it.
        transfer: the number of its upload; None without one.
        time: seconds by cause.
    """

    def __init__(self, index: int) -> None:
        """Begin with the common start."""
        self.index = index
        self.name = f"peer-{index}"
        self.base = 0
        self.place = Progress(0, 0, 0.0, 1)
        self.life = 1
        self.alive = True
        self.gone_from = math.inf
        self.repeating = False
        self.applied = True
        self.awaited = False
        self.in_flight: tuple[int, float] | None = None
        self.made = 0, 0.0
        self.transfer: int | None = None
        self.time: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        self._waits_for: Cause | None = None
        self._since = 0.0
        self._trains_until = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether it makes no steps now."""
        return self._waits_for is not None

    def train(self, steps: int, seconds: float, now: float) -> None:
        """Make steps of its interval from now on."""
        self._change(None, now)
        self.made = self.made[0] + steps, self.made[1] + seconds
        self._trains_until = now + seconds

    def wait_for(self, cause: Cause, now: float) -> None:
        """Make no steps from now on."""
        self._change(cause, now)

    def wait_still_for(self, cause: Cause, now: float) -> None:
        """Wait for something else from now on, should it make no steps."""
        if self.is_waiting:
            self._change(cause, now)

    def finish_interval(self) -> None:
        """Make what was trained a contribution."""
        self.in_flight, self.made, self.applied = self.made, (0, 0.0), False

    def resolve(self, *, counted: bool) -> int:
        """Give the training of the contribution in flight its cause; return its steps."""
        steps, seconds = self.in_flight or (0, 0.0)
        self.time["training" if counted else "lost"] += seconds
        self.in_flight = None
        return steps

    def start_again(self) -> None:
        """Let the peer's next process begin."""
        self.alive, self.gone_from = True, math.inf

    def lose_interval(self, now: float) -> None:
        """Give what has been made of the interval that has begun its cause: it is not contributed."""
        ahead = 0.0 if self.is_waiting else max(self._trains_until - now, 0.0)
        self.time["lost"] += self.made[1] - ahead
        self.made = 0, 0.0

    def die(self, now: float, silence: float) -> None:
        """Lose everything but what is on record at the server, which knows of it after `silence` seconds."""
        self.lose_interval(now)
        if not self.awaited:
            self.resolve(counted=False)
        self.life, self.repeating = self.life + 1, False
        self.alive, self.gone_from = False, now + silence
        self._change("restarting", now)

    def end(self, now: float) -> None:
        """Give all of its time a cause at the end of the run."""
        self.lose_interval(now)
        self.resolve(counted=False)
        self._change(None, now)

    def _change(self, cause: Cause | None, now: float) -> None:
        if self._waits_for is not None:
            self.time[self._waits_for] += now - self._since
        self._waits_for, self._since = cause, now
