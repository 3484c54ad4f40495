# SPDX-License-Identifier: Apache-2.0
"""How long messages of workers take on the links between them.

In a round every worker sends each other one the W-th part of its message. So W/S workers of one of S sites send
W/S * (1 - 1/S) messages through the site's link, and the slower of a worker's own link and its site's decides. Rounds
follow each other on a link in the order in which they were launched.
"""

from __future__ import annotations

from megatron_ext.local_sgd.round_cost import WorkerLink, synchronous_step, way_seconds
from megatron_ext.simulate.fleet import SimulatedFleet

__all__ = ["WorkerLinks"]


class WorkerLinks:
    """The links of all workers."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        """Take links that are idle."""
        self._fleet = fleet
        self._idle_from = 0.0

    def way(self, nbytes: float) -> float:
        """Return the seconds of one way of a round in which every worker sends a number of bytes."""
        fleet = self._fleet
        own = way_seconds(nbytes, 1e9 * fleet.bandwidth, 1e-3 * fleet.latency, fleet.workers)
        if fleet.sites == 1:
            return own
        whole = nbytes * fleet.workers / (fleet.workers - 1)  # with what a worker keeps
        crossing = whole * fleet.workers / fleet.sites * (1 - 1 / fleet.sites)
        return max(own, way_seconds(crossing, 1e9 * fleet.site_bandwidth, 1e-3 * self._latency, fleet.workers))

    def launch(self, time: float, nbytes: float) -> float:
        """Return when one way of a round has come to its end.

        Args:
            time: when the last worker has launched it.
            nbytes: that every worker sends.
        """
        self._idle_from = max(time, self._idle_from) + self.way(nbytes)
        return self._idle_from

    def restart(self, time: float) -> None:
        """Drop what is in flight."""
        self._idle_from = time

    @property
    def _latency(self) -> float:
        """Of a message to any worker, in ms."""
        return max(self._fleet.latency, self._fleet.site_latency)

    def synchronous(self, parameters: int, step_seconds: float) -> float:
        """Return the seconds by which the gradients' ring makes a synchronous step longer.

        A ring through all workers leaves a site once, so that the site's link carries what a worker's does.

        Args:
            parameters: of the model.
            step_seconds: of a step without them.
        """
        fleet = self._fleet
        slowest = min(fleet.bandwidth, fleet.site_bandwidth) if fleet.sites > 1 else fleet.bandwidth
        link = WorkerLink(
            workers=fleet.workers,
            parameters=parameters,
            step_seconds=step_seconds,
            bandwidth=1e9 * slowest,
            latency=1e-3 * self._latency,
        )
        return synchronous_step(link, fleet.overlap * step_seconds) - step_seconds
