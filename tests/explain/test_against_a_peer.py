# SPDX-License-Identifier: Apache-2.0
"""What is predicted of a SPES peer is what a run with a real server has."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.explain.commands import explained
from tests.spes.test_feature import MODEL
from tests.support.waiting import until
from tests.sync_service.jobs import has_joined, job_arguments, start_job
from tests.sync_service.service import Service, Zygote

RUN = {"peers": 2, "outer_optimizer": "sgd", "sync_steps": 4}
SPES = {
    **MODEL,
    "hidden_size": 64,
    "vocab_size": 2048,
    "using_spes": True,
    "spes_num_train_experts_per_node": 2,
    "sync_service_index": 0,
}
KIND = ("single", "fp32-distopt", 2)


def held(model: Any, optimizer: Any, args: Any) -> dict[str, int]:
    from megatron_ext.spes.held import held_bytes

    found = held_bytes(model, optimizer)
    return {"gradients": found.gradients, "optimizer states": found.optimizer}


@pytest.mark.slow
def test_memory_and_messages_of_a_peer_are_those_of_the_run(zygote: Zygote, tmp_path: Path):
    service = Service(zygote, tmp_path, {"demo": RUN})
    service.start()
    first = start_job(service, "a", KIND, probe=held, **SPES)
    until(lambda: has_joined(service), "the first peer, which publishes the start")
    second = start_job(service, "b", KIND, probe=held, **{**SPES, "sync_service_index": 1})
    ranks = first.result()
    second.result()
    service.stop()
    found = explained(2, job_arguments(service, "a", KIND, **SPES))
    (figures,) = found["ranks"]
    memory = {use["cause"]: use["nbytes"] for use in figures["memory"]}
    assert {cause: memory[cause] for cause in ranks[0].probe} == ranks[0].probe
    facts = found["job"]["facts"]["sync-service"]
    assert facts["experts_of_peers"] == [[0, 1], [2, 3]]
    log = "".join(rank.stdout for rank in ranks)
    up, down = re.findall(r"sync MB up: ([\d.]+) \| down: ([\d.]+)", log)[-1]
    assert up == f"{facts['bytes_up'] / 1e6:.3f}"
    # What others train comes to both ranks, and so twice.
    (other,) = explained(2, job_arguments(service, "a", KIND, **SPES), "--rank", "1")["ranks"]
    received = [use["nbytes"] for each in (figures, other) for use in each["traffic"] if use["received"]]
    assert down == f"{sum(received) / 1e6:.3f}"
    assert facts["bytes_down"] <= sum(received)
