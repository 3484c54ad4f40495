# SPDX-License-Identifier: Apache-2.0
"""Contributions with values that are non-finite, or far too large, make no round."""

from collections.abc import Callable

import pytest
import torch

from megatron_ext.errors import UserError
from tests.support.every_run import one_of_each
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import digest, start_values
from tests.sync_service.whole_runs import DILOCO

MakeService = Callable[..., Service]


@pytest.mark.parametrize("content", one_of_each([float("nan"), float("inf"), 3e38, 1e6], {0, 2}))
def test_a_non_finite_contribution_does_not_count_and_its_peer_is_told(make_service: MakeService, content: float):
    service = make_service({"demo": {"peers": 3, "max_norm": 1000.0}})
    service.start()
    peers = [
        service.peer(
            f"p{index}",
            3,
            options={"index": index},
            **({"values": {"2": {"layer.0.bias": content}}} if index == 1 else {}),
        )
        for index in range(3)
    ]
    assert [peer.wait() for peer in peers] == [0, 0, 0], [peer.output for peer in peers]
    non_finite = "tensor 'layer.0.bias' holds values that are non-finite, or far too large"
    reason = "max_norm is 1000" if content == 1e6 else non_finite
    seen = service.seen("p1")
    assert not seen[2]["contributed"] and reason in seen[2]["message"] and seen[3]["contributed"]
    event = service.events("committed")[2]
    assert event["contributors"] == ["p0", "p2"] and reason in event["rejected"]["p1"]
    assert len({service.seen(f"p{index}")[3]["digest"] for index in range(3)}) == 1


def test_a_round_whose_contributions_are_all_non_finite_changes_nothing(make_service: MakeService):
    service = make_service(peers=1, **DILOCO)
    service.start()
    start = start_values(1)
    with service.client("p0", start) as client:
        values = client.start(start)
        outcome = client.sync({name: torch.full_like(value, float("nan")) for name, value in values.items()})
        assert outcome.number == 1 and not outcome.contributed and digest(outcome.values) == digest(start)


@pytest.mark.parametrize(
    "outer", one_of_each([{}, DILOCO, {"outer_optimizer": "adam", "outer_optimizer_lr": 0.01}], {1}), ids=str
)
def test_huge_values_never_become_a_round_that_is_non_finite(make_service: MakeService, outer: dict[str, object]):
    service = make_service(peers=1, **outer)
    service.start()
    start = start_values(1)
    with service.client("p0", start) as client:
        values = client.start(start)
        for huge in (3.4e38, -3.4e38, 1e15):
            outcome = client.sync({name: torch.full_like(value, huge) for name, value in values.items()})
            assert not outcome.contributed and "far too large" in outcome.message
        for large in (1e10, -1e10):
            outcome = client.sync({name: torch.full_like(value, large) for name, value in values.items()})
            assert outcome.contributed and all(bool(value.isfinite().all()) for value in outcome.values.values())


def test_a_start_that_is_non_finite_is_refused_and_the_next_peer_publishes(make_service: MakeService):
    service = make_service()
    service.start()
    start = start_values(1)
    non_finite = {name: torch.full_like(value, float("nan")) for name, value in start.items()}
    with service.client("p0", start) as first, pytest.raises(UserError, match="start that it published is refused"):
        first.start(non_finite)
    with service.client("p1", start) as second:
        assert digest(second.start(start)) == digest(start)
