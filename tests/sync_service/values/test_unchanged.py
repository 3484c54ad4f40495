# SPDX-License-Identifier: Apache-2.0
"""Tensors that nobody has changed, such as frozen ones, cost next to no bytes in either direction."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from tests.sync_service.service import Service

MakeService = Callable[..., Service]
LARGE, SMALL = (300, 512), (64,)
START = {"frozen": torch.randn(LARGE, generator=torch.Generator().manual_seed(1)), "trained": torch.zeros(SMALL)}


@pytest.mark.parametrize(
    ("codec", "outer", "rounds"),
    [("bf16", "none", None), ("int4", "sgd", None), ("int8", "adam", None), ("fp32", "sgd", "asynchronous")],
)
def test_what_has_not_changed_does_not_travel(make_service: MakeService, codec: str, outer: str, rounds: str | None):
    options = {"outer_optimizer_lr": 0.7} if outer != "none" else {}
    service = make_service(peers=2, outer_optimizer=outer, **options, **({"rounds": rounds} if rounds else {}))
    service.start()
    with ExitStack() as stack:
        clients = [stack.enter_context(service.client(f"p{index}", START, codec=codec)) for index in range(2)]
        pool = stack.enter_context(ThreadPoolExecutor(2))
        values = list(pool.map(lambda client: client.start(START), clients))
        for number in range(2):
            own = [{**held, "trained": held["trained"] + number + index} for index, held in enumerate(values)]
            outcomes = list(pool.map(lambda client, mine: client.sync(mine), clients, own))
            for outcome in outcomes:
                assert torch.equal(outcome.values["frozen"], START["frozen"])
                # All of it in 4 bits would be 77,000.
                assert outcome.sent < 1000
                assert rounds is not None or outcome.received < 1000
            values = [outcome.values for outcome in outcomes]
        if rounds is None:
            assert torch.equal(values[0]["trained"], values[1]["trained"]) and bool(values[0]["trained"].any())
