# SPDX-License-Identifier: Apache-2.0
"""gRPC's own health service, for what starts and watches servers: `grpc_health_probe`, Kubernetes, load balancers.

The empty name is the server, every run has its own. A run that has stopped does not serve; one that waits for peers or
for room on the disk does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_ext.sync_service.protocol import health, health_pb2, health_pb2_grpc

__all__ = ["HEALTH_METHODS", "HealthService"]

HEALTH_METHODS = f"/{health.SERVICE_NAME}/"
"""Begins the names of its methods, which need no token: probes cannot show one, and learn one word."""


class HealthService:
    """Says of the server and of every run whether it serves."""

    def __init__(self, runs: Iterable[str]) -> None:
        """Let the server and all runs serve."""
        self._servicer = health.HealthServicer()
        for run in runs:
            self._servicer.set(run, health_pb2.HealthCheckResponse.SERVING)

    def add_to(self, server: Any) -> None:
        """Answer at a gRPC server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def stopped(self, run: str) -> None:
        """Say that a run does not serve any more."""
        self._servicer.set(run, health_pb2.HealthCheckResponse.NOT_SERVING)

    def end(self) -> None:
        """Say that nothing serves any more, for good."""
        self._servicer.enter_graceful_shutdown()
