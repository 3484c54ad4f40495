# SPDX-License-Identifier: Apache-2.0
"""gRPC's own health service, for what starts and watches servers: `grpc_health_probe`, Kubernetes, load balancers.

The empty name is the server, every run has its own. A run that has stopped does not serve; one that waits for peers or
for room on the disk does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

from megatron_ext.sync_service.changes import Changes
from megatron_ext.sync_service.protocol import health, health_pb2
from megatron_ext.sync_service.refusal import Refusal

__all__ = ["HEALTH_METHODS", "HealthService"]

HEALTH_METHODS = f"/{health.SERVICE_NAME}/"
"""Begins the names of its methods, which need no token: probes cannot show one, and learn one word."""

_WATCHES = 64
"""Calls of Watch, which may stay for ever, at a time."""

_REPLY = health_pb2.HealthCheckResponse


class HealthService:
    """Says of the server and of every run whether it serves. May be told from any thread."""

    def __init__(self, runs: Iterable[str]) -> None:
        """Let the server and all runs serve."""
        self._changes = Changes()
        self._serving = dict.fromkeys(("", *runs), True)
        self._watches = 0

    def check(self, request: Any) -> Any:
        """Return whether what is asked for serves.

        Raises:
            Refusal: there is no such thing.
        """
        if request.service not in self._serving:
            raise Refusal("not_found", "there is no such run here")
        return self._reply(request.service)

    async def watch(self, request: Any) -> AsyncGenerator[Any]:
        """Yield whether what is asked for serves, at once and whenever that changes.

        Raises:
            Refusal: too many do so.
        """
        if self._watches >= _WATCHES:
            raise Refusal("full", f"{_WATCHES} callers watch the server's health, which is the most; ask with Check")
        self._watches += 1
        try:
            with self._changes.watched() as changed:
                last = None
                while True:
                    changed.clear()
                    reply = self._reply(request.service)
                    if reply != last:
                        yield reply
                    last = reply
                    await changed.wait()
        finally:
            self._watches -= 1

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
