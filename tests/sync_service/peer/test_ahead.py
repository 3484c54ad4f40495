# SPDX-License-Identifier: Apache-2.0
"""What is not sent twice, and not when everybody waits: experts in flight before a round, tensors that stay."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from megatron_ext.cli.main import main
from megatron_ext.params import flat_offset
from megatron_ext.sync_service.peer import incoming
from megatron_ext.sync_service.peer.client import SyncClient
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.frames import Box, Frame, whole_box
from megatron_ext.sync_service.protocol.round_digest import RoundDigest
from megatron_ext.sync_service.values.contribution import Contribution
from megatron_ext.sync_service.values.open_values import OpenValues
from tests.support.waiting import until
from tests.sync_service.service import Service
from tests.sync_service.watching import Received, watch

MakeService = Callable[..., Service]
Values = dict[str, torch.Tensor]
PEERS = 3
SHAPE = (96, 64)
EXPERTS = [f"experts.{index}" for index in range(2 * PEERS)]
OWNER = {name: index // 2 for index, name in enumerate(EXPERTS)}
CATALOG = Catalog(
    [TensorSpec(name="shared", shape=SHAPE), *(TensorSpec(name=n, shape=SHAPE, owners=(OWNER[n],)) for n in EXPERTS)]
)


def values_of(seed: int) -> Values:
    generator = torch.Generator().manual_seed(seed)
    found = {spec.name: torch.randn(spec.shape, generator=generator) for spec in CATALOG}
    # What nobody changes is brought from -0 to 0 by some codecs, once.
    for name in found.keys() - of(2):
        found[name][:, 0] = -0.0
    return found


def trained(values: Values, index: int, number: int, size: float = 0.1) -> Values:
    """Return values after an interval of a peer, in which what it does not train has not changed."""
    generator = torch.Generator().manual_seed(10 * number + index)
    step = size * torch.randn(SHAPE, generator=generator)
    step[:, 0] = -0.0
    return {name: value + step if OWNER.get(name, index) == index else value for name, value in values.items()}


def digest(values: Values) -> str:
    total = RoundDigest()
    for name, value in values.items():
        total.add(name, SHAPE, whole_box(SHAPE), value)
    return total.hex()


@contextmanager
def started(service: Service, codec: str = "fp32") -> Iterator[tuple[list[SyncClient], Values, list[Received]]]:
    """Yield peers that have begun, what they begin with, and what they get from then on."""
    received: list[Received] = []
    with ExitStack() as stack:
        clients = [
            stack.enter_context(service.client(f"p{index}", CATALOG, codec=codec, index=index))
            for index in range(PEERS)
        ]
        begun = {}
        for client in clients:
            begun = client.start(values_of(1))
            watch(client, received)
        yield clients, begun, received


def of(index: int) -> set[str]:
    return {name for name in EXPERTS if OWNER[name] == index}


def arrived(received: list[Received], index: int) -> Counter[str]:
    """Return how many frames of which tensors a peer has got."""
    return Counter(name for peer, _, name, _ in received if peer == f"p{index}")


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_experts_arrive_once_and_before_the_last_peer_has_sent_its_own(make_service: MakeService, codec: str):
    service = make_service(peers=PEERS, outer_optimizer="sgd")
    service.start()
    with started(service, codec) as (clients, begun, received):
        sent = [trained(begun, index, 1) for index in range(PEERS)]
        for client, values in zip(clients[:2], sent, strict=False):
            client.upload(1, values)
        early = of(1)
        until(lambda: set(arrived(received, 0)) == early, "the experts of p1 at p0")
        frames = arrived(received, 0)
        clients[2].upload(1, sent[2])
        taken = [client.fetch(1, values) for client, values in zip(clients, sent, strict=True)]
        assert len({digest(outcome.values) for outcome in taken}) == 1
        assert {name: arrived(received, 0)[name] for name in early} == frames
        assert set(arrived(received, 0)) == set(begun) - of(0)
        # Rounds continue from what was taken ahead.
        sent = [trained(taken[0].values, index, 2) for index in range(PEERS)]
        for client, values in zip(clients, sent, strict=True):
            client.upload(2, values)
        assert len({digest(client.fetch(2, own).values) for client, own in zip(clients, sent, strict=True)}) == 1


@pytest.mark.parametrize("fate", ["rejected", "evicted"])
def test_what_was_taken_ahead_and_does_not_count_after_all_is_not_continued_from(make_service: MakeService, fate: str):
    service = make_service(peers=PEERS, quorum=PEERS if fate == "rejected" else 2, grace_seconds=0.0, max_norm=1000.0)
    service.start()
    with started(service) as (clients, begun, received):
        sent = [trained(begun, 0, 1), trained(begun, 1, 1, 1e6 if fate == "rejected" else 0.1), trained(begun, 2, 1)]
        # Without a commit the round stays open until the experts have been looked at.
        clients[1]._upload(1, sent[1])
        clients[0]._upload(1, sent[0])
        until(lambda: of(1) <= set(arrived(received, 0)), "the experts of p1 at p0")
        if fate == "evicted":
            assert main(["server", "evict", "p1", "--server", service.address]) == 0
        for client, values in zip(clients, sent, strict=True):
            if client.index != 1 or fate == "rejected":
                client.upload(1, values)
        taken = [clients[index].fetch(1, sent[index]).values for index in (0, 2)]
        assert digest(taken[0]) == digest(taken[1])
        assert all(torch.equal(taken[0][name], begun[name]) for name in of(1))
        assert all(torch.equal(taken[0][name], sent[2][name]) for name in of(2))


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_what_nobody_has_changed_is_not_sent(make_service: MakeService, codec: str):
    service = make_service(peers=PEERS, quorum=2, grace_seconds=0.0)
    service.start()
    with started(service, codec) as (clients, begun, received):
        sent = [trained(begun, index, 1) for index in range(2)]
        for client, values in zip(clients, sent, strict=False):
            client.upload(1, values)
        until(lambda: len(service.events("committed")) == 2, "the round")
        (committed,) = [event for event in service.events("committed") if event["round"] == 1]
        assert committed["kept"] == [place for place, spec in enumerate(CATALOG) if spec.name in of(2)]
        # With a codec a client has the last round's values, without one its caller may have them.
        exact = begun.get if codec == "fp32" else lambda key: None
        taken = [client.fetch(1, own, exact).values for client, own in zip(clients, sent, strict=False)]
        for index in range(2):
            assert not of(2) & set(arrived(received, index))
            assert all(torch.equal(taken[index][name], begun[name]) for name in of(2))
        assert digest(taken[0]) == digest(taken[1])
        # Who was not there gets everything.
        assert digest(clients[2].fetch(1, begun).values) == digest(taken[0])


def test_values_that_the_caller_says_were_kept_and_are_others_are_sent(make_service: MakeService):
    service = make_service(peers=PEERS, quorum=2, grace_seconds=0.0)
    service.start()
    with started(service) as (clients, begun, _received):
        for client in clients[:2]:
            client.upload(1, trained(begun, client.index, 1))
        taken = clients[0].fetch(1, {}, lambda key: begun[key] + 1).values
        assert all(torch.equal(taken[name], begun[name]) for name in of(2))


def test_a_server_that_is_killed_meanwhile_costs_no_bit(make_service: MakeService):
    service = make_service(peers=PEERS)
    service.start()
    with started(service) as (clients, begun, received):
        sent = [trained(begun, index, 1) for index in range(PEERS)]
        for client in clients[:2]:
            client.upload(1, sent[client.index])
        until(lambda: of(1) <= set(arrived(received, 0)), "the experts of p1 at p0")
        service.server.kill()
        service.server.wait()
        service.start()
        clients[2].upload(1, sent[2])
        taken = [client.fetch(1, sent[client.index]).values for client in clients]
        assert len({digest(values) for values in taken}) == 1
        assert all(torch.equal(taken[0][name], sent[OWNER[name]][name]) for name in EXPERTS)


def test_values_that_were_taken_ahead_and_do_not_add_up_are_taken_again(
    make_service: MakeService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    service = make_service(peers=PEERS)
    service.start()
    with started(service, "int8") as (clients, begun, received):
        sent = [trained(begun, index, 1) for index in range(PEERS)]
        monkeypatch.setattr(incoming, "step_of", lambda arrived, codec: arrived)  # of the wrong sign
        for client in clients[:2]:
            client.upload(1, sent[client.index])
        until(lambda: of(1) <= set(arrived(received, 0)), "the experts of p1 at p0")
        clients[2].upload(1, sent[2])
        taken = [client.fetch(1, sent[client.index]).values for client in clients]
        assert len({digest(values) for values in taken}) == 1
    assert "what was taken ahead of it is not what is said of it" in caplog.text


@pytest.mark.parametrize(
    ("codec", "rows", "known"), [("fp32", 3, True), ("bf16", 3, True), ("int8", 3, False), ("int8", 4, True)]
)
def test_a_box_is_known_before_the_round_where_no_other_blocks_are_coded(
    tmp_path: Path, codec: str, rows: int, known: bool
):
    spec = TensorSpec(name="w", shape=(8, 64), owners=(0,))
    contribution = Contribution(tmp_path / "p.frames", Catalog([spec]), codec)
    boxes = [Box((0, 0), (rows, 64)), Box((rows, 0), (8 - rows, 64))]
    for box in boxes:
        contribution.append(Frame.make(spec.name, spec.shape, box, 0, torch.randn(box.numel), codec))
    found = OpenValues(Catalog([spec]), codec, sent=lambda _: contribution, merged=frozenset())
    for box in boxes:
        frames = list(found.frames(spec, box, flat_offset(spec.shape, box.start, box.shape), 1 << 18))
        assert [frame.box for _, frame in frames] == [box] * known
    whole = list(found.frames(spec, whole_box(spec.shape), 0, 1 << 18))
    assert [source for source, _ in whole] == [contribution.identity]
    merged = OpenValues(Catalog([spec]), codec, sent=lambda _: contribution, merged=frozenset({"w"}))
    assert not list(merged.frames(spec, whole_box(spec.shape), 0, 1 << 18))


def test_a_client_that_is_closed_in_the_middle_asks_no_more(make_service: MakeService):
    service = make_service(peers=PEERS)
    service.start()
    with started(service) as (clients, begun, _received):
        clients[0].upload(1, trained(begun, 0, 1))
        asking = clients[0]._ahead
        clients[0].rest()
        assert not any(thread.is_alive() for thread in asking._threads)
