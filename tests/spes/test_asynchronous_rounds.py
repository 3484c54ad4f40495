# SPDX-License-Identifier: Apache-2.0
"""Peers that train their own experts and wait for nobody: real trainings, with guards and merges, and one killed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.spes.test_feature import OWNED, RUN, SPES, expert_of, values_and_memory, watch_steps
from tests.support.pretrain import RankOutcome
from tests.support.waiting import until
from tests.sync_service.jobs import SINGLE, die_in_step, failing_job, model_of, run_job, same_bits, start_job
from tests.sync_service.service import Service

MakeService = Callable[..., Service]
ALONE = {**RUN, "rounds": "asynchronous", "skip_anomaly": True, "ewma_warmup_steps": 2, "clip_pseudo_grad": 1.0}
KIND = ("moe-ep2", "bf16-distopt-overlap", 2)


def after_the_other(service: Service, saves: Path, *, dies: bool, delay: int) -> list[RankOutcome]:
    """Train peer a to its end, and then peer b, so that the order of the rounds is the same every time."""
    service.start()
    run_job(service, "a", SINGLE, sync_service_index=0, **SPES)
    # A checkpoint applies the round in flight, so that both runs have one.
    given: dict[str, Any] = {**SPES, "sync_service_index": 1, "save": str(saves), "save_interval": 6}
    given |= {"sync_service_delay": delay} if delay else {}
    if dies:
        failing_job(service, "b", KIND, before=die_in_step(7), **given)
        return run_job(service, "b", KIND, load=str(saves), probe=values_and_memory, **given)
    return run_job(service, "b", KIND, before=watch_steps, probe=values_and_memory, **given)


@pytest.mark.parametrize("delay", [0, 3])
def test_a_killed_peer_resumes_in_mid_interval_bit_for_bit(make_service: MakeService, tmp_path: Path, delay: int):
    whole, killed = (make_service({"demo": ALONE}) for _ in range(2))
    wanted = after_the_other(whole, tmp_path / "whole", dies=False, delay=delay)
    rounds = [event for event in whole.events("committed") if event["round"]]
    assert [event["contributors"] for event in rounds] == [["a"], ["a"], ["b"], ["b"]]
    assert [event["round"] for event in rounds if "merged" in event] == [4]
    # What it owns is all that its steps change.
    for changed, _ in wanted[0].probe[3]:
        assert {expert_of(name) for name in changed} <= {None, *OWNED["b"]}

    assert ("the checkpoint applies round 3 after 2 of 3 steps" in wanted[0].stdout) == (delay == 3)
    found = after_the_other(killed, tmp_path / "killed", dies=True, delay=delay)
    assert "1 of 2 of the samples, 2 steps after round " in found[0].stdout
    digests = [[event["digest"] for event in service.events("committed")] for service in (whole, killed)]
    assert digests[0] == digests[1]
    assert same_bits(model_of(found), model_of(wanted))


def test_peers_of_different_pace_train_at_the_same_time(make_service: MakeService):
    run = {name: value for name, value in ALONE.items() if not name.startswith(("sync_steps", "merge"))}
    service = make_service({"demo": run})
    service.start()
    slow = start_job(service, "a", SINGLE, sync_service_index=0, **SPES)
    until(lambda: service.events("committed"), "the start")
    fast = run_job(service, "b", SINGLE, sync_service_index=1, **{**SPES, "sync_service_interval": 2})
    ends = {"a": model_of(slow.result()), "b": model_of(fast)}
    made = [event for event in service.events("committed") if event["round"]]
    assert sorted(event["contributors"][0] for event in made) == ["a", "a", "b", "b", "b", "b"]
    last = made[-1]["contributors"][0]
    other = "ab".replace(last, "")
    # The other one's experts are as it has left them.
    assert all(
        (ends[last][name] == ends[other][name]).all() for name in ends[last] if expert_of(name) in OWNED[other]
    )
