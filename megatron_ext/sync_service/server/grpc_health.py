# SPDX-License-Identifier: Apache-2.0
"""gRPC's own health service, for what starts and watches servers: `grpc_health_probe`, Kubernetes, load balancers.

The empty name is the server, every run has its own. A run that has stopped does not serve; one that waits for peers or
for room on the disk does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

from megatron_ext.sync_service.callers.call_limits import Places
from megatron_ext.sync_service.protocol.protocol import health, health_pb2
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.rounds.changes import Changes

__all__ = ["HEALTH_METHODS", "HealthService"]

HEALTH_METHODS = f"/{health.SERVICE_NAME}/"
"""Begins the names of its methods, which need no token: probes cannot show one, and learn one word."""

_REPLY = health_pb2.HealthCheckResponse


class HealthService:
    """Says of the server and of every run whether it serves. May be told from any thread."""

    def __init__(self, runs: Iterable[str], watches: int) -> None:
        """Let the server and all runs serve.

        Args:
            runs: their names.
            watches: how many calls may watch at a time, which may stay forever: `health_watches` of the configuration.
        """
        self._changes = Changes()
        self._serving = dict.fromkeys(("", *runs), True)
        self._places = Places(watches // 4, watches)
        self._watches = watches

    def check(self, request: Any) -> Any:
        """Return whether what is asked for serves.

        Raises:
            Refusal: there is no such thing.
        """
        if request.service not in self._serving:
            raise Refusal("not_found", "there is no such run here")
        return self._reply(request.service)

    async def watch(self, request: Any, address: str) -> AsyncGenerator[Any]:
        """Yield whether what is asked for serves, at once and whenever that changes.

        Args:
            request: names it.
            address: of the caller, without its port.

        Raises:
            Refusal: too many do so, altogether or of the address.
        """
        full = Refusal(
            "full",
            f"as many calls watch the server's health as health_watches of the server allows, {self._watches}, and "
            f"{self._watches // 4} of an address; ask with Check, or raise health_watches",
        )
        with self._places.taken(address, full), self._changes.watched() as changed:
            last = None
            while True:
                changed.clear()
                reply = self._reply(request.service)
                if reply != last:
                    yield reply
                last = reply
                await changed.wait()

    def stopped(self, run: str) -> None:
        """Say that a run does not serve any more."""
        self._tell({run: False})

    def end(self) -> None:
        """Say that nothing serves any more, for good."""
        self._tell(dict.fromkeys(self._serving, False))

    def _tell(self, serving: dict[str, bool]) -> None:
        with self._changes:
            self._serving |= serving
            self._changes.notify_all()

    def _reply(self, name: str) -> Any:
        if name not in self._serving:
            return _REPLY(status=_REPLY.SERVICE_UNKNOWN)
        return _REPLY(status=_REPLY.SERVING if self._serving[name] else _REPLY.NOT_SERVING)
