# SPDX-License-Identifier: Apache-2.0
"""Two peers, each with half of the experts, and what each of them trained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.spes.test_feature import RUN, SPES, values_and_memory, watch_steps
from tests.support.waiting import until
from tests.sync_service.jobs import has_joined, model_of, same_bits, start_job
from tests.sync_service.service import Service, Zygote

OWNED = {"a": {0, 1}, "b": {2, 3}}
"""Experts by peer."""


def trained_by_owners(zygote: Zygote, folder: Path, **options: Any) -> Iterator[tuple[set[int], Any]]:
    """Train both peers, which have to end with the same bits; yield experts and the tensors that a step touched.

    Args:
        zygote: starts the server.
        folder: of its files.
        options: further ones of both peers.
    """
    service = Service(zygote, folder, {"demo": RUN})
    service.start()
    given = {"before": watch_steps, "probe": values_and_memory, **SPES, **options}
    given["spes_expert_assignment"] = "contiguous"
    kind = ("single", "fp32", 1)
    first = start_job(service, "a", kind, sync_service_index=0, **given)
    until(lambda: has_joined(service), "the first peer, which publishes the start")
    second = start_job(service, "b", kind, sync_service_index=1, **given)
    jobs = {"a": first.result(), "b": second.result()}
    service.stop()
    assert same_bits(*map(model_of, jobs.values()))
    for name, (rank,) in jobs.items():
        for touched in rank.probe[3]:
            for tensors in touched:  # those that changed, and those with a gradient
                yield OWNED[name], tensors
