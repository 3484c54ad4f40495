# SPDX-License-Identifier: Apache-2.0
"""The values that asynchronous rounds lead to: those of the formula for the order of arrival, whoever is killed."""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from megatron_ext.outer.optimizers.delayed_nesterov import DelayedNesterov
from megatron_ext.sync_service.peer.client import Report, SyncClient
from megatron_ext.sync_service.protocol.catalog import Catalog
from tests.support.every_run import one_of_each
from tests.sync_service.rounds.asynchronous_runs import ASYNC, DELAYED, begin
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import SHAPES, digest, start_values, trained

MakeService = Callable[..., Service]


def script(clients: list[SyncClient], turns: str) -> list[str]:
    """Let peers start and contribute in an order, each for a number of steps of its own; return the digests seen."""
    values = [client.start(start_values(7)) for client in clients]
    seen = [digest(values[0])]
    for turn in turns:
        index = int(turn)
        client = clients[index]
        values[index] = trained(values[index], index, client.round + 1)
        outcome = client.sync(values[index], Report(loss=1.0, steps=10 * (1 + index)))
        assert outcome.contributed and outcome.contributors == (client.config.peer,)
        values[index] = outcome.values
        seen.append(digest(outcome.values))
    return seen


def expected(turns: str, *, per_step: int, lr: float, momentum: float, weighted: bool) -> list[str]:
    """Return the digests that the formula gives in one process."""
    start = start_values(7)
    flat = {name: value.clone().view(-1) for name, value in start.items()}
    optimizers = {name: DelayedNesterov([flat[name]], lr=lr, momentum=momentum, count=per_step) for name in start}
    bases, rounds = {0: 0, 1: 0, 2: 0}, [start]
    known: dict[int, int] = {}
    for turn in turns:
        index = int(turn)
        base = rounds[bases[index]]
        known[index] = 10 * (1 + index)
        weight = known[index] / sum(known.values()) * len(known) if weighted else 1.0
        after = trained(base, index, bases[index] + 1)
        for name in SHAPES:
            gradient = (base[name] - after[name]).view(-1)
            optimizers[name].step(0, slice(None), gradient.mul_(weight) if weight != 1 else gradient)
        rounds.append({name: value.clone().view(SHAPES[name]) for name, value in flat.items()})
        bases[index] = len(rounds) - 1
    return [digest(values) for values in rounds]


TURNS = "0120012"
CATALOG = Catalog.of_tensors(start_values(0))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9], ids=["average", "delayed-nesterov"])
def test_the_values_are_where_the_formula_says_for_the_order_of_arrival(
    make_service: MakeService, momentum: float, shards: int
):
    outer = {**DELAYED, "step_weights": True} if momentum else {**ASYNC, "reducer": "linear"}
    service = make_service(peers=3, **outer)
    begin(service, shards)
    with ExitStack() as stack:
        clients = [stack.enter_context(service.client(f"p{index}", CATALOG, index=index)) for index in range(3)]
        seen = script(clients, TURNS)
    lr, per_step = (0.7, 2) if momentum else (1.0, 3)
    assert seen == expected(TURNS, per_step=per_step, lr=lr, momentum=momentum, weighted=bool(momentum))
    assert [event["digest"] for event in service.events("committed")] == seen
    assert [event["made_for"] for event in service.events("committed")[1:]] == [1, 1, 1, 2, 5, 3, 4]


@pytest.mark.parametrize(
    ("failpoint", "shards", "victim"),
    one_of_each(
        [
            ("upload_journaled:4", 1, 0),
            ("round_closed:5", 1, 0),
            ("tensor_reduced:12", 1, 0),
            ("snapshot_renamed:4", 1, 0),
            ("round_committed:4", 3, 0),
            ("snapshot_renamed:4", 3, 0),
            ("frame_spooled:4", 3, 1),
            ("upload_checked:4", 3, 1),
            ("snapshot_written:4", 3, 2),
        ],
        {1, 3, 4, 7},
    ),
)
def test_a_server_killed_at_any_step_resumes_bit_for_bit(
    make_service: MakeService, failpoint: str, shards: int, victim: int
):
    service = make_service(peers=3, **DELAYED)
    cluster = begin(service, shards, {victim: failpoint})
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        clients = [stack.enter_context(service.client(f"p{index}", CATALOG, index=index)) for index in range(3)]
        seen = pool.submit(script, clients, TURNS)
        assert cluster.servers[victim].wait() == -signal.SIGKILL
        cluster.start(victim)
        assert seen.result() == expected(TURNS, per_step=2, lr=0.7, momentum=0.9, weighted=False)
    uploads = [(event["peer"], event["round"]) for event in service.events("uploaded")]
    assert len(set(uploads)) == len(uploads) == 1 + len(TURNS)


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_lossy_contributions_lose_nothing_for_good(make_service: MakeService, codec: str):
    service = make_service(peers=2, **ASYNC)
    service.start()
    start, target = {"w": torch.zeros(256)}, torch.linspace(0.5, 1.0, 256)
    with ExitStack() as stack:
        clients = [stack.enter_context(service.client(f"p{index}", start, codec=codec)) for index in range(2)]
        values = [client.start(start)["w"] for client in clients]
        for turn in (0, 1, 0, 0, 1, 0, 1, 1):
            values[turn] = clients[turn].sync({"w": values[turn] + target}).values["w"]
    # Each of the eight counts a half; what codecs lose of one comes with the next.
    torch.testing.assert_close(values[1], 4 * target, rtol=0, atol=0.02)
