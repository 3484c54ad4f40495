# SPDX-License-Identifier: Apache-2.0
"""Muon trains the experts that a peer owns and no others; rounds bring the rest."""

from tests.spes.test_feature import RUN, SPES, expert_of, values_and_memory, watch_steps
from tests.support.waiting import until
from tests.sync_service.jobs import has_joined, model_of, same_bits, start_job
from tests.sync_service.service import Service, Zygote

MUON = {"optimizer": "muon", "spes_expert_assignment": "contiguous"}
OWNED = {"a": {0, 1}, "b": {2, 3}}


def test_a_peer_trains_its_own_experts_and_rounds_bring_the_others(zygote: Zygote, tmp_path):
    service = Service(zygote, tmp_path, {"demo": RUN})
    service.start()
    options = {"before": watch_steps, "probe": values_and_memory, **SPES, **MUON}
    kind = ("single", "fp32", 1)
    first = start_job(service, "a", kind, sync_service_index=0, **options)
    until(lambda: has_joined(service), "the first peer, which publishes the start")
    second = start_job(service, "b", kind, sync_service_index=1, **options)
    jobs = {"a": first.result(), "b": second.result()}
    service.stop()
    for name, (rank,) in jobs.items():
        for changed, graded in rank.probe[3]:
            for tensors in (changed, graded):
                assert {expert_of(tensor) for tensor in tensors} == {None, *OWNED[name]}
    assert same_bits(*map(model_of, jobs.values()))
