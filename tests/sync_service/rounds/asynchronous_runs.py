# SPDX-License-Identifier: Apache-2.0
"""Options of runs with asynchronous rounds, and their servers."""

from collections.abc import Mapping

from tests.sync_service.cluster import Cluster
from tests.sync_service.service import Service

ASYNC = {"rounds": "asynchronous"}
DELAYED = {**ASYNC, "outer_optimizer": "sgd", "outer_optimizer_lr": 0.7, "contributions_per_step": 2}


def begin(service: Service, shards: int, failpoints: Mapping[int, str] | None = None) -> Cluster:
    """Start one server, or several that have parts of the values."""
    cluster = Cluster(service, shards, **service.extra)
    cluster.start_all(failpoints)
    return cluster
