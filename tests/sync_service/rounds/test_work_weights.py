# SPDX-License-Identifier: Apache-2.0
"""In a synchronous round peers can count by their steps or by their tokens."""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from megatron_ext.errors import UserError
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.report import Progress, Report
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import digest, start_values

MakeService = Callable[..., Service]
Values = dict[str, torch.Tensor]
PEERS = 3
CATALOG = Catalog(
    [
        TensorSpec(name="all", shape=(300, 7)),
        TensorSpec(name="two", shape=(50,), owners=(0, 2)),
        TensorSpec(name="one", shape=(50,), owners=(1,)),
    ]
)
START = start_values(1, {spec.name: spec.shape for spec in CATALOG})
STEPS, BATCHES = (30, 10, 20), (4, 8, 2)
BY = {"step_weights": torch.tensor(STEPS), "token_weights": torch.tensor(STEPS) * torch.tensor(BATCHES)}
PLAIN_SGD = {"outer_optimizer": "sgd", "outer_optimizer_lr": 1.0, "outer_optimizer_momentum": 0.0}


def trained(values: Values, index: int) -> Values:
    generator = torch.Generator().manual_seed(100 + index)
    return {
        spec.name: values[spec.name] + torch.randn(spec.shape, generator=generator)
        for spec in CATALOG
        if spec.is_trained_by(index)
    }


def report(index: int) -> Report:
    steps, batch = STEPS[index], BATCHES[index]
    return Report(steps=steps, progress=Progress(steps, steps * batch, steps * batch, batch))


def make_rounds(service: Service, rounds: int = 1, *failpoints: str) -> tuple[Values, list[Values]]:
    """Return the start, and what the last round made, as every peer has it; failpoints kill the server in that one."""
    server = service.start(*failpoints)
    with ExitStack() as stack, ThreadPoolExecutor(PEERS) as pool:
        clients = [stack.enter_context(service.client(f"p{place}", CATALOG, index=place)) for place in range(PEERS)]
        begun = list(pool.map(lambda client: client.start(START), clients))
        made = begun
        for number in range(rounds):
            tasks = [
                pool.submit(client.sync, trained(values, client.index), report(client.index))
                for client, values in zip(clients, made, strict=True)
            ]
            if failpoints and number == rounds - 1:
                assert server.wait() == -signal.SIGKILL
                service.start()
            made = [task.result().values for task in tasks]
        return begun[0], made


def weighted(start: Values, name: str, places: tuple[int, ...], weights: torch.Tensor) -> torch.Tensor:
    changes = torch.stack([trained(start, place)[name] - start[name] for place in places]).double()
    chosen = weights[list(places)].double()
    return start[name] + torch.tensordot(chosen / chosen.sum(), changes, dims=1).float()


@pytest.mark.parametrize("kind", BY)
@pytest.mark.parametrize("outer", [{}, PLAIN_SGD], ids=["mean", "outer sgd"])
def test_contributions_count_by_what_was_done_in_the_interval(
    make_service: MakeService, kind: str, outer: dict[str, Any]
):
    service = make_service(peers=PEERS, **{kind: True}, **outer)
    start, made = make_rounds(service)
    assert len({digest(values) for values in made}) == 1
    torch.testing.assert_close(made[0]["all"], weighted(start, "all", (0, 1, 2), BY[kind]), rtol=0, atol=2e-6)
    # Owners are weighted among themselves; what one has sent is taken as it is.
    torch.testing.assert_close(made[0]["two"], weighted(start, "two", (0, 2), BY[kind]), rtol=0, atol=2e-6)
    assert torch.equal(made[0]["one"], trained(start, 1)["one"])
    equal = weighted(start, "all", (0, 1, 2), torch.ones(PEERS))
    assert not torch.allclose(made[0]["all"], equal, rtol=0, atol=0.01)


def test_the_weights_of_a_round_outlive_the_server(make_service: MakeService):
    options = {"peers": PEERS, "token_weights": True, "outer_optimizer": "sgd", "outer_optimizer_lr": 0.7}
    _, undisturbed = make_rounds(make_service(**options), 2)
    _, killed = make_rounds(make_service(**options), 2, "round_closed:3")
    assert digest(killed[0]) == digest(undisturbed[0])


def test_norms_and_steps_share_the_weights(make_service: MakeService):
    options = {"peers": PEERS, "step_weights": True, "pseudo_gradnorm_reduce": True}
    start, made = make_rounds(make_service(**options, step_weight_ratio=0.25))
    norms = torch.stack([(trained(start, place)["all"] - start["all"]).norm() for place in range(PEERS)]).double()
    by_steps = BY["step_weights"].double() / sum(STEPS)
    weights = 0.75 * torch.softmax(-norms, dim=0) + 0.25 * by_steps
    torch.testing.assert_close(made[0]["all"], weighted(start, "all", (0, 1, 2), weights), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "said", "missing"),
    [
        ("step_weights", Report(), "step_weights of the run needs the steps of the interval; report them"),
        ("token_weights", Report(steps=3), "token_weights of the run needs the steps of the interval and the samples"),
    ],
)
def test_a_peer_that_does_not_say_what_it_has_done_is_refused(
    make_service: MakeService, kind: str, said: Report, missing: str
):
    service = make_service(peers=1, **{kind: True})
    service.start()
    start = {"w": torch.zeros(4)}
    with service.client("p0", start) as client:
        values = client.start(start)
        with pytest.raises(UserError, match=missing):
            client.sync(values, said)
