# SPDX-License-Identifier: Apache-2.0
"""What peers can rely on when nothing goes wrong: real server, real peers."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_ext.errors import UserError
from megatron_ext.outer.codecs.all_codecs import lossy_codecs
from megatron_ext.outer.optimizers.sgd import OuterSGD
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import SHAPES, digest, start_values, trained

MakeService = Callable[..., Service]


def expected(count: int, rounds: int, seed: int, *, lr: float = 1.0, momentum: float = 0.0) -> list[dict]:
    """Return the values of every round, as the formula gives them in one process."""
    values = start_values(seed)
    found = [values]
    flat = {name: value.clone().view(-1) for name, value in values.items()}
    optimizers = {name: OuterSGD([flat[name]], lr=lr, momentum=momentum, nesterov=True) for name in values}
    for number in range(1, rounds + 1):
        peers = [trained(found[-1], index, number) for index in range(count)]
        for name in SHAPES:
            terms = [peer[name].view(-1) for peer in peers]
            if momentum == 0:
                flat[name].copy_(sum(terms[1:], terms[0]) / count)
            else:
                terms = [flat[name] - term for term in terms]
                optimizers[name].step(0, slice(0, terms[0].numel()), sum(terms[1:], terms[0]) / count)
        found.append({name: value.clone().view(SHAPES[name]) for name, value in flat.items()})
    return found


@pytest.mark.parametrize("momentum", [0.0, 0.9], ids=["fedavg", "diloco"])
def test_peers_are_bit_identical_and_are_where_the_formula_says(make_service: MakeService, momentum: float):
    outer = {"outer_optimizer": "sgd", "outer_optimizer_lr": 0.7, "outer_optimizer_momentum": 0.9}
    service = make_service({"demo": {"peers": 3, **(outer if momentum else {})}})
    service.start()
    peers = [service.peer(f"p{index}", 3, options={"index": index}, seed=5) for index in range(3)]
    assert [peer.wait() for peer in peers] == [0, 0, 0], [peer.output for peer in peers]
    wanted = [digest(values) for values in expected(3, 3, 5, lr=0.7, momentum=momentum)]
    for index in range(3):
        assert [service.seen(f"p{index}")[number]["digest"] for number in range(4)] == wanted
    assert [event["digest"] for event in service.events("committed")] == wanted
    assert service.events("committed")[-1]["contributors"] == ["p0", "p1", "p2"]
    size = 4 * sum(value.numel() for value in start_values(5).values())
    traffic = [service.seen(f"p{index}")[number]["traffic"] for index in range(3) for number in (1, 2, 3)]
    assert traffic == [[size, size]] * 9


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_round_can_be_taken_into_memory_of_an_earlier_one(make_service: MakeService, codec: str):
    service = make_service({"demo": {"peers": 2}})
    service.start()
    start = {"w": torch.randn(700, 300), "e0": torch.randn(500), "e1": torch.randn(500)}
    owners = {"e0": (0,), "e1": (1,)}
    catalog = Catalog(TensorSpec(name=n, shape=tuple(v.shape), owners=owners.get(n, ())) for n, v in start.items())
    with (
        service.client("p0", catalog, codec=codec, index=0) as first,
        service.client("p1", catalog, codec=codec, index=1) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        values = list(pool.map(lambda client: client.start(start), (first, second)))
        memory = {name: torch.full_like(value, float("nan")) for name, value in start.items()}
        for number in range(3):
            sent = [trained(own, index, number) for index, own in enumerate(values)]
            held = {name: value.data_ptr() for name, value in memory.items()}
            rounds = [
                pool.submit(first.sync, sent[0], out=memory),
                pool.submit(second.sync, sent[1]),
            ]
            found = [made.result().values for made in rounds]
            assert digest(found[0]) == digest(found[1])
            assert {name: value.data_ptr() for name, value in found[0].items()} == held
            values, memory = found, values[0]


@pytest.mark.parametrize(
    "memory", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 2).t()], ids=str
)
def test_memory_that_does_not_fit_is_named_and_nothing_is_sent(make_service: MakeService, memory: torch.Tensor):
    service = make_service({"demo": {"peers": 1}})
    service.start()
    with service.client("p", {"w": torch.ones(2, 3)}) as client:
        values = client.start({"w": torch.ones(2, 3)})
        with pytest.raises(UserError, match=r"out: 'w' is .*; it must be torch.float32 of shape \(2, 3\)"):
            client.sync(values, out={"w": memory})
        assert torch.equal(client.sync(values).values["w"], torch.ones(2, 3))


def test_memory_of_what_is_sent_is_refused(make_service: MakeService):
    service = make_service({"demo": {"peers": 1}})
    service.start()
    with service.client("p", {"w": torch.ones(2, 3)}) as client:
        values = client.start({"w": torch.ones(2, 3)})
        with pytest.raises(UserError, match="out: 'w' is the memory of values that are sent"):
            client.sync(values, out=values)


@pytest.mark.parametrize("codec", lossy_codecs())
def test_peers_are_bit_identical_with_lossy_codecs(make_service: MakeService, codec: str):
    service = make_service(outer_optimizer="sgd")
    service.start()
    peers = [service.peer(f"p{index}", 3, codec=codec) for index in range(2)]
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    seen = [service.seen(f"p{index}") for index in range(2)]
    assert [seen[0][number]["digest"] for number in range(4)] == [seen[1][number]["digest"] for number in range(4)]


def test_error_feedback_brings_a_coarse_codec_to_where_exact_messages_lead(make_service: MakeService):
    service = make_service({"coarse": {"peers": 1}})
    service.start()
    start = {"w": torch.zeros(256)}
    target = torch.linspace(0.5, 1.0, 256)
    with service.client("p", start, codec="int4") as client:
        values = client.start(start)
        for _ in range(6):
            # Always the same pseudo-gradient: what one message loses, later ones bring.
            values = client.sync({"w": values["w"] + target}).values
    # Without feedback the rounding errors of six equal messages would add up.
    scale = target.max() / 7
    assert float((values["w"] - 6 * target).abs().max()) < float(scale)
    assert float((values["w"] - 6 * target).abs().max()) > 0


def test_one_peer_without_an_outer_optimizer_gets_back_what_it_sent(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    start = start_values(1)
    with service.client("p0", start) as client:
        values = client.start(start)
        assert all(torch.equal(values[name], start[name]) for name in SHAPES)
        for number in (1, 2):
            sent = trained(values, 0, number)
            values = client.sync(sent).values
            assert all(torch.equal(values[name], sent[name]) for name in SHAPES)


def test_who_uploads_first_changes_no_bit(make_service: MakeService):
    digests = []
    for late in (0, 2):
        service = make_service({"demo": {"peers": 3, "outer_optimizer": "sgd"}})
        service.start()
        peers = [
            service.peer(
                f"p{index}",
                2,
                options={"index": index},
                seed=3,
                pauses={"1": 0.4 * abs(index - late), "2": 0.1 * index},
            )
            for index in range(3)
        ]
        assert [peer.wait() for peer in peers] == [0, 0, 0]
        order = [event["peer"] for event in service.events("uploaded") if event["round"] == 1]
        digests.append(([event["digest"] for event in service.events("committed")], order))
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]


def test_two_runs_on_one_server_do_not_touch(make_service: MakeService):
    service = make_service({"left": {"peers": 2}, "right": {"peers": 1}})
    service.start()
    peers = [service.peer(name, 2, run=run, seed=1) for name, run in (("a", "left"), ("b", "left"), ("c", "right"))]
    assert [peer.wait() for peer in peers] == [0, 0, 0], [peer.output for peer in peers]
    alone = expected(1, 2, 1)
    assert [service.seen("c")[number]["digest"] for number in range(3)] == [digest(values) for values in alone]
    assert service.seen("a")[2]["digest"] == service.seen("b")[2]["digest"] != service.seen("c")[2]["digest"]


def test_a_late_peer_starts_from_the_current_round(make_service: MakeService):
    service = make_service({"demo": {"peers": 3, "quorum": 2, "grace_seconds": 0.5}})
    service.start()
    early = [service.peer(f"p{index}", 3, options={"index": index}) for index in range(2)]
    assert [peer.wait() for peer in early] == [0, 0], [peer.output for peer in early]
    early = [service.peer(f"p{index}", 5, options={"index": index}) for index in range(2)]
    late = service.peer("late", 5)
    assert [peer.wait() for peer in (*early, late)] == [0, 0, 0], late.output
    seen = service.seen("late")
    assert min(seen) >= 3 and seen[min(seen)]["index"] == 2
    assert seen[5]["digest"] == service.seen("p0")[5]["digest"] == service.seen("p1")[5]["digest"]


def test_a_peer_trains_only_what_it_owns_and_the_owner_wins(make_service: MakeService):
    service = make_service(outer_optimizer="sgd", outer_optimizer_lr=1.0, outer_optimizer_momentum=0.0)
    service.start()
    owners = {"shared": (), "e0": (0,), "e1": (1,), "both": (0, 1)}
    specs = [TensorSpec(name=name, shape=(3,), owners=of) for name, of in owners.items()]
    start = {spec.name: torch.zeros(spec.shape) for spec in specs}
    clients = [service.client(f"p{index}", Catalog(specs)) for index in range(2)]
    clients[0].start(start)
    clients[1].start(start)
    for index, client in enumerate(clients):
        own = {name: torch.full_like(value, index + 1.0) for name, value in start.items()}
        del own[f"e{1 - index}"]
        client.upload(1, own)
    for client in clients:
        values = client.fetch(1, {}).values
        assert [values[name][0].item() for name in ("shared", "e0", "e1", "both")] == [1.5, 1.0, 2.0, 1.5]
        client.close()
