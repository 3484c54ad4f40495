# SPDX-License-Identifier: Apache-2.0
"""Merging experts at the server: after the mean, at its steps alone, whole or not at all; and sending them back."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megatron_ext.errors import UserError
from megatron_ext.outer.codecs.all_codecs import CODECS
from megatron_ext.spes import Ownership, merge_experts
from megatron_ext.sync_service.channel.connection import DamagedOnTheWay
from megatron_ext.sync_service.channel.route import Route
from megatron_ext.sync_service.channel.streams import Streams
from megatron_ext.sync_service.peer.download import download
from megatron_ext.sync_service.peer.parts import whole_parts
from megatron_ext.sync_service.protocol import wire
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.protocol import pb2
from tests.sync_service.service import Service
from tests.sync_service.watching import Received, watch

MakeService = Callable[..., Service]
Values = dict[str, torch.Tensor]
EXPERTS, LAYERS = 6, 2
OWNERSHIP = Ownership.contiguous(2, EXPERTS)
MERGING = {"sync_steps": 10, "merge_interval": 20, "merge_alpha_start": 0.5, "merge_decay_steps": 100, "merge_topk": 2}


def shapes() -> dict[str, tuple[int, ...]]:
    found = {"embedding.word_embeddings.weight": (20, 4)}
    for layer in range(LAYERS):
        found[f"decoder.layers.{layer}.mlp.router.weight"] = (EXPERTS, 4)
        for expert in range(EXPERTS):
            found[f"decoder.layers.{layer}.mlp.experts.{expert}.linear_fc1.weight"] = (6, 4)
            found[f"decoder.layers.{layer}.mlp.experts.{expert}.linear_fc2.weight"] = (4, 3)
    return found


CATALOG = Catalog(
    TensorSpec(name=name, shape=shape, owners=OWNERSHIP.owners_of(name)) for name, shape in shapes().items()
)


def start_values(seed: int = 1) -> Values:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes().items()}


def trained(values: Values, peer: int, number: int) -> Values:
    """Return values after an interval of a peer, in which what it does not own has not changed."""
    generator = torch.Generator().manual_seed(10 * number + peer)
    return {
        name: value + torch.randn(value.shape, generator=generator) * OWNERSHIP.is_trained(name, peer)
        for name, value in values.items()
    }


def expected(rounds: int) -> list[Values]:
    """Return the values of every round, worked out in this process."""
    found = [start_values()]
    for number in range(1, rounds + 1):
        peers = [trained(found[-1], peer, number) for peer in range(2)]
        mean = {}
        for name in found[-1]:
            owners = OWNERSHIP.owners_of(name) or (0, 1)
            terms = [peers[owner][name] for owner in owners]
            mean[name] = sum(terms[1:], terms[0]) / len(terms)
        alpha = 0.5 * (1 - number * 10 / 100) if number % 2 == 0 else 0.0
        found.append(merge_experts(mean, alpha=alpha, topk=2) if alpha else mean)
    return found


def run_rounds(
    service: Service, rounds: int, codec: str = "fp32", received: list[Received] | None = None
) -> list[Values]:
    """Return the values of the rounds that two peers make; adds every frame that they get to `received`."""
    with service.client("p0", CATALOG, codec=codec) as first, service.client("p1", CATALOG, codec=codec) as second:
        clients = (first, second)
        for client in clients if received is not None else ():
            watch(client, received)
        found = [client.start(start_values()) for client in clients][:1]
        for number in range(1, rounds + 1):
            sent = [trained(found[-1], client.index, number) for client in clients]
            for client, values in zip(clients, sent, strict=True):
                client.upload(number, values)
            taken = [client.fetch(number, values).values for client, values in zip(clients, sent, strict=True)]
            assert all(torch.equal(taken[0][name], taken[1][name]) for name in taken[0])
            found.append(taken[0])
    return found


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_a_peers_own_experts_are_not_sent_back_unless_they_were_merged(make_service: MakeService, codec: str):
    service = make_service(**MERGING)
    service.start()
    received: list[Received] = []
    run_rounds(service, 2, codec, received)
    everything = set(shapes())
    experts = {name for name in everything if ".experts." in name}
    for peer in range(2):
        own = {name for name in everything if OWNERSHIP.owners_of(name) == (peer,)}
        found = [[entry for entry in received if entry[:2] == (f"p{peer}", at)] for at in range(3)]
        names = [{name for *_, name, _ in entries} for entries in found]
        assert own and names == [everything, everything - own, everything]
        # The rest as updates in the run's codec; what was merged is sent as it is.
        assert {used for *_, used in found[0]} == {"fp32"} and {used for *_, used in found[1]} == {codec}
        assert {name for *_, name, used in found[2] if used == "fp32"} == (everything if codec == "fp32" else experts)


def test_own_experts_come_back_where_the_round_made_something_else_of_them(make_service: MakeService):
    service = make_service(peers=1, max_norm=1.0)
    service.start()
    start = start_values()
    catalog = Catalog(TensorSpec(name=name, shape=shape, owners=(0,)) for name, shape in shapes().items())
    with service.client("p0", catalog) as client:
        client.start(start)
        near = {name: value + 1e-4 for name, value in start.items()}
        far = {name: value + 1.0 for name, value in start.items()}
        for sent, wanted in ((near, near), (far, near)):
            found = client.sync(sent).values
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_download_that_calls_something_unchanged_that_was_not_expected_is_damaged():
    class Lying:
        def again(self, what: str, once: Callable[[], Any], *_: Any) -> Any:
            return once()

        def stream(self, method: str, request: Any, streams: Streams) -> Iterator[Any]:
            yield wire.Batch(unchanged=[self.place])

    parts, connection = whole_parts(Catalog([TensorSpec(name="w", shape=(3,))])), Lying()
    for connection.place, expected in ((0, None), (1, {"w": torch.zeros(3)})):
        with ThreadPoolExecutor(1) as pool, pytest.raises(DamagedOnTheWay, match="said to be as expected, and was not"):
            download(Route(connection), pool, pb2.Caller(), parts, 1, 1, expected)


@pytest.mark.parametrize("codec", CODECS.own_names)
def test_a_merge_of_experts_that_all_peers_train_stays_when_nobody_trains_on(make_service: MakeService, codec: str):
    service = make_service(**{**MERGING, "peers": 1})
    service.start()
    start = start_values()
    catalog = Catalog(TensorSpec(name=name, shape=shape) for name, shape in shapes().items())
    with service.client("p0", catalog, codec=codec) as client:
        rounds = [client.start(start)]
        for _ in range(3):
            rounds.append({name: value.clone() for name, value in client.sync(rounds[-1]).values.items()})
    merged = {event["round"] for event in service.events("committed") if event.get("merged")}
    assert merged == {2}
    for name in shapes():
        assert torch.equal(rounds[1][name], rounds[0][name]) and torch.equal(rounds[3][name], rounds[2][name])
        assert torch.equal(rounds[2][name], rounds[1][name]) == (".experts." not in name)


def test_experts_are_merged_after_the_mean_at_the_steps_of_the_schedule(make_service: MakeService):
    service = make_service(**MERGING)
    service.start()
    for found, wanted in zip(run_rounds(service, 4), expected(4), strict=True):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    merged = {event["round"]: event.get("merged") for event in service.events("committed")}
    assert merged == {0: None, 1: None, 2: pytest.approx(0.4), 3: None, 4: pytest.approx(0.3)}


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_experts_whose_owner_is_away_are_merged_as_well(make_service: MakeService, codec: str):
    service = make_service(**{**MERGING, "quorum": 1, "grace_seconds": 0.5})
    service.start()
    with service.client("p0", CATALOG, codec=codec) as first, service.client("p1", CATALOG, codec=codec) as away:
        values = first.start(start_values())
        away.start(start_values())
        for number in (1, 2):
            sent, before = trained(values, 0, number), values
            first.upload(number, sent)
            values = first.fetch(number, sent).values
    (theirs, *_) = [spec.name for spec in CATALOG if spec.owners == (1,)]
    assert not torch.equal(values[theirs], before[theirs])


def test_a_server_killed_in_the_middle_of_merging_merges_once(make_service: MakeService):
    service = make_service(**MERGING)
    server = service.start("layer_merged")

    def start_again() -> None:
        assert server.wait() == -signal.SIGKILL
        service.start()

    helper = threading.Thread(target=start_again)
    helper.start()
    found, wanted = run_rounds(service, 3)[2], expected(2)[2]
    helper.join()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert len(service.events("started")) == 2


def test_a_run_that_merges_refuses_peers_that_do_not_fit(make_service: MakeService):
    service = make_service(**MERGING)
    service.start()
    plain = Catalog.of_tensors({"w": torch.zeros(3)})
    lacking = Catalog(spec for spec in CATALOG if "1.mlp.experts.2.linear_fc1" not in spec.name)
    for catalog, agreed, problem in (
        (plain, {}, "merge_interval is 20 in the run, but the catalog has no experts"),
        (lacking, {}, "tensor decoder.layers.1.mlp.experts.2.linear_fc1.weight is missing"),
        (CATALOG, {"--sync-service-interval": "50"}, "--sync-service-interval is 50 at the peer, and sync_steps 10"),
    ):
        with service.client("p0", catalog, agreed=agreed) as client, pytest.raises(UserError, match=problem):
            client.register()
    with service.client("p0", CATALOG, agreed={"--sync-service-interval": "10"}) as client:
        assert client.register() == 0


def test_an_interval_that_no_rounds_fall_on_is_said(make_service: MakeService):
    service = make_service(**{**MERGING, "merge_interval": 15})
    service.start()
    assert "merge_interval is 15 and sync_steps 10, so experts are merged every 30 steps" in service.output
