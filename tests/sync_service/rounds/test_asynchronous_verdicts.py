# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rounds with guards and with owners: a contribution is judged as if all had come with it, as they last
did."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from megatron_ext.local_sgd import LocalSGDConfig
from megatron_ext.outer.optimizers.delayed_nesterov import DelayedNesterov
from megatron_ext.outer.penalty import Penalty, clip_coefficient
from megatron_ext.spes import merge_experts
from megatron_ext.sync_service.peer.client import Report, RoundOutcome, SyncClient
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.report import Progress
from tests.support.every_run import one_of_each
from tests.sync_service.rounds.asynchronous_runs import ASYNC, DELAYED, begin
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import digest, start_values

MakeService = Callable[..., Service]
Values = dict[str, torch.Tensor]
PEERS = 3
EXPERT = "decoder.layers.0.mlp.experts.{}.linear_fc{}.weight"
OWNERS = {0: (0,), 1: (0, 1), 2: (1,), 3: (2,)}
CATALOG = Catalog(
    [
        TensorSpec(name="embedding", shape=(30, 7), unit="embedding"),
        TensorSpec(name="attention", shape=(300, 3), unit="layer.0"),
        TensorSpec(name="norm", shape=(), unit="layer.0"),
        TensorSpec(name="output", shape=(9, 40)),
        *(
            TensorSpec(name=EXPERT.format(expert, layer), shape=(8, 12), unit="layer.0", owners=owners)
            for expert, owners in OWNERS.items()
            for layer in (1, 2)
        ),
    ]
)
START = start_values(7, {spec.name: spec.shape for spec in CATALOG})
TURNS = "012" * 5 + "0012" + "2211"
STEPS = (30, 10, 20)


def trained(values: Values, index: int, turn: int, size: float = 0.1) -> Values:
    """Return values after an interval of a peer, in which what it does not own has not changed."""
    generator = torch.Generator().manual_seed(1000 * turn + index)
    return {
        spec.name: values[spec.name] + size * torch.randn(spec.shape, generator=generator) * spec.is_trained_by(index)
        for spec in CATALOG
    }


def size_of(turn: int) -> float:
    """Return how far a peer goes in its turn: once much too far."""
    return 5.0 if turn == 16 else 0.1


def script(clients: list[SyncClient], turns: str) -> Iterator[RoundOutcome]:
    """Let peers start and contribute in an order; yields what comes of each turn."""
    values = [client.start(START) for client in clients]
    for turn, letter in enumerate(turns):
        index = int(letter)
        sent = trained(values[index], index, turn, size_of(turn))
        outcome = clients[index].sync(sent, Report(loss=1.0, steps=STEPS[index]))
        values[index] = outcome.values
        yield outcome


def made(service: Service, turns: str = TURNS, codec: str = "fp32") -> list[RoundOutcome]:
    with ExitStack() as stack:
        clients = [
            stack.enter_context(service.client(f"p{index}", CATALOG, index=index, codec=codec))
            for index in range(PEERS)
        ]
        return list(script(clients, turns))


class Formula:
    """What is to come of contributions that are judged as if the others had come with them."""

    def __init__(self, penalty: dict[str, Any], *, per_step: int, lr: float, momentum: float) -> None:
        config = LocalSGDConfig(use_local_sgd=True, local_sgd_workers=PEERS, **penalty)
        self.clip = config.clip_pseudo_grad
        self.units = list(dict.fromkeys(spec.judged_as for spec in CATALOG))
        self.penalty = Penalty(config, workers=PEERS, units=len(self.units))
        self.norms = torch.zeros(PEERS, len(self.units), dtype=torch.float64)
        self.work = [0] * PEERS
        self.flat = {name: value.clone().view(-1) for name, value in START.items()}
        self.optimizers = {
            spec.name: DelayedNesterov([self.flat[spec.name]], lr=lr, momentum=momentum, count=per_step)
            for spec in CATALOG
            if not spec.owners
        }

    def take(self, index: int, base: Values, after: Values) -> tuple[Values, list[str]]:
        """Return the values that come of a contribution, and the units in which it did not count."""
        gradients = {spec.name: (base[spec.name] - after[spec.name]).view(-1) for spec in CATALOG}
        for place, unit in enumerate(self.units):
            squares = [gradients[spec.name].double().square().sum() for spec in CATALOG if spec.judged_as == unit]
            self.norms[index, place] = torch.stack(squares).sum().sqrt()
        self.work[index] = STEPS[index]
        verdicts = self.penalty.decide(self.norms.clone(), self.work, fresh={index})
        without = []
        for place, unit in enumerate(self.units):
            accepted, weights = verdicts[place].accepted, verdicts[place].weights
            mine = dict(zip(accepted, weights, strict=True)).get(index, 0.0)
            if index not in accepted and any(s.judged_as == unit and s.is_trained_by(index) for s in CATALOG):
                without.append(unit)
            weight = mine * len(accepted)
            weight *= clip_coefficient(weight * float(self.norms[index, place]), self.clip)
            for spec in CATALOG:
                if spec.judged_as == unit and not spec.owners:
                    self.optimizers[spec.name].step(0, slice(None), gradients[spec.name] * weight)
                elif spec.judged_as == unit and index in spec.owners and mine:
                    owners = sum(w for worker, w in zip(accepted, weights, strict=True) if worker in spec.owners)
                    # Who has not come yet weighs as the others do on average.
                    owners += sum(1 / len(accepted) for owner in spec.owners if not self.work[owner])
                    self.flat[spec.name].sub_(gradients[spec.name] * (mine / owners))
        return {spec.name: self.flat[spec.name].clone().view(spec.shape) for spec in CATALOG}, without


GUARDS = {"skip_anomaly": True, "ewma_warmup_steps": 3, "ewma_threshold": 8.0, "clip_pseudo_grad": 2.5}
WEIGHTS = {"pseudo_gradnorm_reduce": True, "step_weight_ratio": 0.25}


@pytest.mark.parametrize(
    ("penalty", "shards"),
    one_of_each(
        [({}, 1), (GUARDS, 1), (GUARDS, 3), (WEIGHTS, 1), ({**GUARDS, **WEIGHTS, "ewma_relative": True}, 3)], {2, 4}
    ),
    ids=str,
)
def test_the_values_are_where_the_formula_says_for_the_order_of_arrival(
    make_service: MakeService, penalty: dict[str, Any], shards: int
):
    weights = {"step_weights": True} if "step_weight_ratio" in penalty else {}
    service = make_service(peers=PEERS, **DELAYED, **penalty, **weights)
    begin(service, shards)
    outcomes = made(service)
    formula = Formula({**penalty, "use_step_weight": bool(weights)}, per_step=2, lr=0.7, momentum=0.9)
    bases = [START] * PEERS
    excluded = []
    for turn, (letter, outcome) in enumerate(zip(TURNS, outcomes, strict=True)):
        index = int(letter)
        wanted, without = formula.take(index, bases[index], trained(bases[index], index, turn, size_of(turn)))
        assert outcome.contributed and len(outcome.excluded) == len(without), (turn, outcome.excluded, without)
        for name, value in wanted.items():
            torch.testing.assert_close(outcome.values[name], value, rtol=0, atol=5e-6, msg=f"turn {turn}: {name}")
        bases[index] = outcome.values
        excluded += [turn] * bool(without)
    assert excluded == ([16] if "skip_anomaly" in penalty else [])


@pytest.mark.parametrize(
    ("failpoint", "shards", "victim"),
    one_of_each(
        [
            ("round_closed:18", 1, 0),
            ("snapshot_renamed:17", 1, 0),
            ("round_committed:16", 3, 0),
            ("snapshot_written:17", 3, 1),
            ("snapshot_written:18", 3, 2),
        ],
        {0, 3},
    ),
)
def test_a_server_killed_at_any_step_judges_as_if_nothing_had_been(
    make_service: MakeService, failpoint: str, shards: int, victim: int
):
    options = {"peers": PEERS, **DELAYED, **GUARDS, "pseudo_gradnorm_reduce": True}
    undisturbed = make_service(**options)
    begin(undisturbed, shards)
    wanted = [(digest(outcome.values), outcome.excluded) for outcome in made(undisturbed)]
    service = make_service(**options)
    cluster = begin(service, shards, {victim: failpoint})
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(made, service)
        assert cluster.servers[victim].wait() == -signal.SIGKILL
        cluster.start(victim)
        assert [(digest(outcome.values), outcome.excluded) for outcome in found.result()] == wanted
    assert any(excluded for _, excluded in wanted)


@pytest.mark.parametrize("also", [{}, {"pseudo_gradnorm_reduce": True}], ids=["steps", "norms and steps"])
def test_neither_who_has_left_nor_whoever_takes_its_place_stands_beside_anybody(
    make_service: MakeService, also: dict[str, Any]
):
    service = make_service(peers=2, step_weights=True, step_weight_ratio=1.0 if also else 0.5, **also, **ASYNC)
    service.start()
    start = {"w": torch.zeros(4)}
    with ExitStack() as stack:
        first, other = (stack.enter_context(service.client(name, start, index="ab".index(name))) for name in "ab")
        values = [client.start(start) for client in (first, other)]
        for steps, client, index in ((30, first, 0), (10, other, 1), (30, first, 0)):
            values[index] = client.sync(values[index], Report(steps=steps)).values
        other.leave()
        stack.enter_context(service.client("c", start, index=1)).start(start)
        first.sync(values[0], Report(steps=20))
    assert [event["weight"] for event in service.events("committed") if event["round"]] == [1.0, 0.5, 1.5, 1.0]


def test_as_many_tokens_as_can_be_said_stop_no_run(make_service: MakeService):
    service = make_service(peers=2, token_weights=True, **ASYNC)
    service.start()
    start = {"w": torch.zeros(4)}
    with service.client("a", start) as first, service.client("b", start) as other:
        values = first.start(start)
        other.start(start)
        most = 2**50
        first.sync(values, Report(steps=most, progress=Progress(most, most, most, most)))
        assert other.sync(values, Report(steps=2, progress=Progress(2, 8, 8, 4))).contributed
    weights = [event["weight"] for event in service.events("committed") if event["round"]]
    assert weights == [1.0, pytest.approx(2 * 8 / (most**2 + 8))]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "topk"])
def test_an_owner_gets_back_what_it_sent_and_the_others_get_it_with_their_next_round(
    make_service: MakeService, codec: str
):
    service = make_service(peers=PEERS, step_weights=True, **ASYNC)
    service.start()
    reports = [Report(steps=steps) for steps in STEPS]
    with ExitStack() as stack:
        clients = [
            stack.enter_context(service.client(f"p{index}", CATALOG, index=index, codec=codec))
            for index in range(PEERS)
        ]
        values = [client.start(START) for client in clients]
        name = EXPERT.format(3, 1)
        lossy = {"fp32": 1e-6, "bf16": 1e-2, "int8": 1e-2, "topk": 1.0}[codec]
        for turn in range(3):
            sent = trained(values[2], 2, turn)
            values[2] = clients[2].sync(sent, reports[2]).values
            torch.testing.assert_close(values[2][name], sent[name], rtol=0, atol=lossy)
            assert all(torch.equal(values[2][EXPERT.format(e, 1)], START[EXPERT.format(e, 1)]) for e in range(3))
        assert torch.equal(values[0][name], START[name])
        values[0] = clients[0].sync(trained(values[0], 0, 9), reports[0]).values
        # Nobody has trained the other's.
        assert torch.equal(values[0][name], values[2][name])
        assert torch.equal(values[0][EXPERT.format(2, 1)], START[EXPERT.format(2, 1)])
        # Of what two own each moves its part, and that leads to the same bits for who has the values before.
        newest = values[1] = clients[1].sync(trained(values[1], 1, 10), reports[1]).values
        name = EXPERT.format(1, 2)
        for turn in (11, 12):
            sent, before = trained(values[0], 0, turn), values[0]
            values[0] = clients[0].sync(sent, reports[0]).values
            wanted, newest = newest[name] + 0.75 * (sent[name] - before[name]), values[0]
            torch.testing.assert_close(values[0][name], wanted, rtol=0, atol=lossy)


@pytest.mark.parametrize(("codec", "shards"), [("fp32", 1), ("bf16", 3)])
def test_experts_are_merged_when_all_have_made_the_steps_on_average(
    make_service: MakeService, codec: str, shards: int
):
    merging = {"sync_steps": 10, "merge_interval": 20, "merge_alpha_start": 0.5, "merge_decay_steps": 100}
    service = make_service(peers=PEERS, **ASYNC, **merging, merge_topk=2)
    begin(service, shards)
    outcomes = made(service, "012122", codec)
    merged = {event["round"]: event["merged"] for event in service.events("committed") if "merged" in event}
    assert merged == {6: pytest.approx(0.4)}
    (before, after), turn = (outcome.values for outcome in outcomes[-2:]), 5
    sent = trained(before, 2, turn)
    unmerged = {**before, **{EXPERT.format(3, layer): sent[EXPERT.format(3, layer)] for layer in (1, 2)}}
    wanted = merge_experts({name: value for name, value in unmerged.items() if ".experts." in name}, alpha=0.4, topk=2)
    for name, value in wanted.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-6 if codec == "fp32" else 1e-2)
        assert not torch.equal(after[name], before[name])
