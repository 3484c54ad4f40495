# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel ranks that have no expert of their peer's to train: they train what is shared."""

from pathlib import Path

import pytest

from tests.spes.test_feature import RUN, SPES, bfloat16, expert_of, values_and_memory, watch_steps
from tests.support.every_run import one_of_each
from tests.support.waiting import until
from tests.sync_service.jobs import die_in_step, failing_job, has_joined, model_of, run_job, same_bits, start_job
from tests.sync_service.service import Service, Zygote

# Peer a owns the experts 0 and 1, all on rank 0; b owns 2 and 3, all on rank 1.
CONTIGUOUS = {**SPES, "spes_expert_assignment": "contiguous"}
OWNED = {"a": {0, 1}, "b": {2, 3}}

WAYS = ["fp32", "bf16-distopt-overlap"]


@pytest.mark.parametrize("way", one_of_each(WAYS, {0}))
def test_ranks_without_own_experts_train_what_is_shared(zygote: Zygote, tmp_path: Path, way: str):
    service = Service(zygote, tmp_path, {"demo": RUN})
    service.start()
    kind = ("moe-ep2", way, 2)
    options = {"before": watch_steps, "probe": values_and_memory, **CONTIGUOUS}
    first = start_job(service, "a", kind, sync_service_index=0, **options)
    until(lambda: has_joined(service), "the first peer, which publishes the start")
    second = start_job(service, "b", kind, sync_service_index=1, **options)
    jobs = {"a": first.result(), "b": second.result()}
    service.stop()
    for name, ranks in jobs.items():
        for index, rank in enumerate(ranks):
            steps = rank.probe[3]
            own = OWNED[name] if (name == "a") == (index == 0) else set()
            assert len(steps) == 8
            for changed, graded in steps:
                assert {expert_of(tensor) for tensor in changed} == {None, *own}
                assert {expert_of(tensor) for tensor in graded} == {None, *own}
        assert [step.grad_norm for step in ranks[0].record.steps] == [step.grad_norm for step in ranks[1].record.steps]
    ours, theirs = map(model_of, jobs.values())
    for tensor, values in ours.items():
        other = theirs[tensor]
        if way != "fp32" and expert_of(tensor) is not None:
            # Where it is frozen it has no fp32 copy.
            values, other = bfloat16(values), bfloat16(other)
        assert values.tobytes() == other.tobytes(), tensor


@pytest.mark.parametrize("way", one_of_each(WAYS, {1}))
def test_a_killed_peer_resumes_with_the_state_of_all_its_ranks(zygote: Zygote, tmp_path: Path, way: str):
    alone = {**RUN, "quorum": 1, "grace_seconds": 0.1}
    service = Service(zygote, tmp_path, {"whole": alone, "killed": alone})
    service.start()
    kind = ("moe-ep2", way, 2)
    options = {"sync_service_index": 0, "save_interval": 6, **CONTIGUOUS}
    whole = run_job(service, "a", kind, sync_service_run="whole", save=str(tmp_path / "whole"), **options)
    options |= {"sync_service_run": "killed", "save": str(tmp_path / "killed")}
    failing_job(service, "a", kind, before=die_in_step(7), **options)
    again = run_job(service, "a", kind, load=str(tmp_path / "killed"), **options)
    service.stop()
    assert "2 steps after round 1" in again[0].stdout
    assert same_bits(model_of(again), model_of(whole))
