# SPDX-License-Identifier: Apache-2.0
"""EDiT's guards at the server: unit by unit, remembered from round to round, and never touching what one owner sent."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.values.guards import Guards
from tests.sync_service.service import Service
from tests.sync_service.values.test_reduction import NONE, Rounds, Values

PEERS = 3
CATALOG = Catalog(
    [
        TensorSpec(name="a", shape=(40,), unit="layer.0"),
        TensorSpec(name="e", shape=(40,), unit="layer.0", owners=(1,)),
        TensorSpec(name="both", shape=(40,), unit="layer.0", owners=(0, 1)),
        TensorSpec(name="b", shape=(40,), unit="layer.1"),
        TensorSpec(name="alone", shape=(40,)),
    ]
)


def guarded(folder: Path, optimizer: OuterOptimizerConfig = NONE, **penalty) -> Rounds:
    config = LocalSGDConfig(use_local_sgd=True, local_sgd_workers=PEERS, **penalty)
    return Rounds(folder, optimizer, catalog=CATALOG, penalty=config)


def start(rounds: Rounds) -> Values:
    return rounds.make({spec.name: torch.ones(spec.shape) for spec in CATALOG})[0]


def moved(values: Values, index: int, size: float = 1.0, **sizes: float) -> Values:
    """Return a peer's values after an interval: every tensor that it trains moved by a norm of about its size."""
    generator = torch.Generator().manual_seed(100 * index + int(1000 * values["a"][0]))
    found = {}
    for spec in CATALOG:
        if spec.is_trained_by(index):
            direction = torch.randn(spec.shape, generator=generator)
            norm = sizes.get(spec.name, size) * (1 + 0.1 * float(torch.rand(1, generator=generator)))
            found[spec.name] = values[spec.name] - direction * (norm / direction.norm())
    return found


def test_an_anomalous_peer_is_left_out_of_the_unit_alone_and_experience_outlives_the_server(tmp_path: Path):
    rounds = guarded(tmp_path, skip_anomaly=True, ewma_warmup_steps=4)
    values = start(rounds)
    for _ in range(6):
        values, outcome = rounds.make(*(moved(values, index) for index in range(PEERS)))
        assert not outcome.excluded
    peers = [moved(values, index, **({"a": 50.0} if index == 1 else {})) for index in range(PEERS)]
    found, outcome = rounds.make(*peers)
    assert list(outcome.excluded) == ["p1"] and not outcome.rejected
    ((unit, reason),) = outcome.excluded["p1"].items()
    told = re.fullmatch(
        r"the norm of its pseudo-gradient is ([\d.]+), ([\d.e+]+) standard deviations above its mean of ([\d.]+); "
        r"the limit is ([\d.]+)",
        reason,
    )
    assert unit == "layer.0" and told is not None, outcome.excluded
    norm, deviations, mean, limit = map(float, told.groups())
    # Beside tensor a there is nothing that all train in this unit.
    assert norm == pytest.approx(float((values["a"] - peers[1]["a"]).norm()), rel=1e-3)
    assert 0.9 < mean < 1.2 and deviations > limit >= 3
    assert torch.equal(found["a"], (peers[0]["a"] + peers[2]["a"]) / 2)
    assert torch.equal(found["b"], (peers[0]["b"] + peers[1]["b"] + peers[2]["b"]) / 3)
    # Its experts are judged by themselves.
    assert torch.equal(found["e"], peers[1]["e"]) and torch.equal(
        found["both"], (peers[0]["both"] + peers[1]["both"]) / 2
    )
    peers = [moved(found, index, **({"e": 50.0} if index == 1 else {})) for index in range(PEERS)]
    again, outcome = rounds.make(*peers)
    assert {peer: list(units) for peer, units in outcome.excluded.items()} == {"p1": ["layer.0 (its own experts)"]}
    assert torch.equal(again["e"], found["e"]) and torch.equal(again["both"], peers[0]["both"])
    assert torch.equal(again["a"], (peers[0]["a"] + peers[1]["a"] + peers[2]["a"]) / 3)


@pytest.mark.parametrize("relative", [False, True])
def test_peers_that_are_away_or_non_finite_teach_the_detector_nothing(tmp_path: Path, relative: bool):
    rounds = guarded(tmp_path, skip_anomaly=True, ewma_warmup_steps=4, ewma_threshold=6.0, ewma_relative=relative)
    values = start(rounds)
    for number in range(10):
        peers = [moved(values, index) for index in range(PEERS)]
        # Peer 2 comes now and then, and once non-finite.
        peers[2] = peers[2] if number % 3 == 0 else None
        if number == 9:
            peers[2]["b"][0] = torch.nan
        values, outcome = rounds.make(*peers)
        assert not outcome.excluded and list(outcome.rejected) == (["p2"] if number == 9 else [])
    state = rounds.before.metadata["guards"]
    detector = Guards(rounds.penalty, CATALOG, PEERS, state)._penalty._detector
    assert detector.count[:, 0].tolist() == [10, 10, 3]


def test_weights_are_those_of_local_sgd_and_owners_are_taken_as_they_are(tmp_path: Path):
    rounds = guarded(tmp_path, pseudo_gradnorm_reduce=True, weight_softmax_temperature=0.5)
    values = start(rounds)
    peers = [moved(values, index, size=1.0 + index) for index in range(PEERS)]
    found, _ = rounds.make(*peers)
    norms = torch.stack([(values["b"] - peer["b"]).norm() for peer in peers])
    weights = torch.softmax(-norms / 0.5, dim=0)
    torch.testing.assert_close(found["b"], sum(weight * peer["b"] for weight, peer in zip(weights, peers, strict=True)))
    assert torch.equal(found["e"], peers[1]["e"])


@pytest.mark.parametrize("sizes", [(100.0, 100.2), (1000.0, 1000.5), (1000.0, 1500.0)])
def test_owners_are_weighted_among_themselves_however_little_they_weigh_beside_others(tmp_path: Path, sizes):
    rounds = guarded(tmp_path, pseudo_gradnorm_reduce=True)
    values = start(rounds)
    # Peer 2 owns nothing here, and peer 1 an expert of its own besides: its norm is that of both.
    peers = [moved(values, index, **({"both": sizes[index], "e": 1e-3} if index < 2 else {})) for index in range(PEERS)]
    found, _ = rounds.make(*peers)
    norms = torch.stack([(values["both"] - peer["both"]).double().norm() for peer in peers[:2]])
    weights = torch.softmax(-norms, dim=0)
    expected = sum(weight * peer["both"].double() for weight, peer in zip(weights, peers[:2], strict=True))
    torch.testing.assert_close(found["both"].double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("optimizer", [NONE, OuterOptimizerConfig()], ids=["none", "sgd"])
def test_the_common_pseudo_gradient_of_what_all_train_is_clipped(tmp_path: Path, optimizer: OuterOptimizerConfig):
    clipped, free = (
        guarded(tmp_path / name, optimizer, **penalty)
        for name, penalty in (("clipped", {"clip_pseudo_grad": 0.5}), ("free", {"skip_anomaly": True}))
    )
    found = []
    for rounds in (clipped, free):
        rounds.folder.mkdir()
        values = start(rounds)
        found.append(rounds.make(*(moved(values, index, b=0.1) for index in range(PEERS)))[0])
    step = {name: [values[name] - each[name] for each in found] for name in values}
    full = 1.0 if optimizer is NONE else 0.7 * 1.9
    assert float(step["a"][0].norm()) == pytest.approx(0.5 * full, rel=1e-4)
    torch.testing.assert_close(step["a"][0], step["a"][1] * (0.5 * full / step["a"][1].norm()), rtol=1e-4, atol=1e-5)
    # Below the limit, and what owners train.
    assert all(torch.equal(found[0][name], found[1][name]) for name in ("b", "e", "both"))


def test_without_a_guard_that_speaks_up_no_bit_changes(tmp_path: Path):
    found = []
    for name, penalty in (("with", {"skip_anomaly": True, "clip_pseudo_grad": 1e6}), ("without", {})):
        (tmp_path / name).mkdir()
        rounds = guarded(tmp_path / name, **penalty)
        values = start(rounds)
        for _ in range(3):
            values, _ = rounds.make(*(moved(values, index) for index in range(PEERS)))
        found.append(rounds.sums)
    assert found[0] == found[1]


def test_experience_with_another_length_of_the_warm_up_is_refused(tmp_path: Path):
    rounds = guarded(tmp_path, skip_anomaly=True, ewma_warmup_steps=4)
    values = start(rounds)
    rounds.make(*(moved(values, index) for index in range(PEERS)))
    config = LocalSGDConfig(use_local_sgd=True, local_sgd_workers=PEERS, skip_anomaly=True, ewma_warmup_steps=5)
    with pytest.raises(UserError, match=re.escape("ewma_warmup_steps is 5, but the run's detector has learned with 4")):
        Guards(config, CATALOG, PEERS, rounds.before.metadata["guards"])


def test_a_peer_is_told_what_did_not_count_and_why_also_by_a_restarted_server(make_service: Callable[..., Service]):
    service = make_service(peers=2, skip_anomaly=True, ewma_warmup_steps=4)
    server = service.start("round_committed:8")
    peers = [service.peer("p0", 7), service.peer("p1", 7, values={"7": {"layer.0.weight": 9.0}})]
    assert server.wait() != 0
    service.start()
    assert [peer.wait() for peer in peers] == [0, 0]
    told = {name: service.seen(name)[7] for name in ("p0", "p1")}
    assert told["p0"]["excluded"] == {} and all(entry["contributed"] for entry in told.values())
    assert list(told["p1"]["excluded"]) == ["layer.0.weight"]
    assert told["p1"]["excluded"]["layer.0.weight"].startswith("the norm of its pseudo-gradient is ")
    assert service.events("committed")[-1]["excluded"] == {"p1": told["p1"]["excluded"]}
    assert not any(entry["excluded"] for name in told for number, entry in service.seen(name).items() if number < 7)


def test_a_server_says_at_its_start_that_it_cannot_resume_with_the_experience(make_service: Callable[..., Service]):
    service = make_service(peers=1, skip_anomaly=True)
    server = service.start()
    assert service.peer("p0", 1).wait() == 0
    server.kill(signal.SIGTERM)
    assert server.wait() == 0
    service.runs["demo"]["ewma_warmup_steps"] = 7
    assert service.start().wait() == 2
    assert "run demo: ewma_warmup_steps is 7, but the run's detector has learned with 120" in service.output


@pytest.mark.parametrize(("stated", "skipped"), [({}, 3), ({"ewma_relearn_rounds": 0}, 5)])
def test_a_rise_that_peers_share_is_learned_after_the_stated_rounds_and_told(tmp_path: Path, stated, skipped):
    rounds = guarded(tmp_path, skip_anomaly=True, ewma_warmup_steps=4, **stated)
    values = start(rounds)
    for _ in range(6):
        values, _ = rounds.make(*(moved(values, index) for index in range(PEERS)))
    units = {"layer.0", "layer.1", "alone"}
    for number in range(5):
        values, outcome = rounds.make(*(moved(values, index, size=5.0) for index in range(PEERS)))
        left_out = {peer: set(found) for peer, found in outcome.excluded.items()}
        owned = {"layer.0 (its own experts)"}
        everything = {"p0": units | owned, "p1": units | owned, "p2": units}
        assert left_out == (everything if number < skipped else {})
        assert {peer: set(found) for peer, found in outcome.new_levels.items()} == (
            everything if number == skipped - 1 < 4 else {}
        )
    assert not outcome.lasting


def test_the_rise_of_a_single_owner_is_learned_from_its_own_norms(tmp_path: Path):
    rounds = guarded(tmp_path, skip_anomaly=True, ewma_warmup_steps=4)
    values = start(rounds)
    told = []
    for number in range(12):
        sizes = {"e": 8.0, "both": 8.0} if number >= 6 else {}
        # Only peer 1 is here, which owns both.
        values, outcome = rounds.make(None, moved(values, 1, **sizes), None)
        told.append(set(outcome.excluded.get("p1", {})))
        if outcome.new_levels:
            ((title, (before, now)),) = outcome.new_levels["p1"].items()
            assert number == 8 and title == "layer.0 (its own experts)" and now == pytest.approx(8 * before, rel=0.2)
    assert told == [set()] * 6 + [{"layer.0 (its own experts)"}] * 3 + [set()] * 3


def test_a_peer_that_is_left_out_for_long_is_told_of_with_the_way_out_in_a_runs_words(tmp_path: Path):
    rounds = guarded(tmp_path, skip_anomaly=True, ewma_warmup_steps=4)
    values = start(rounds)
    found = {}
    for number in range(27):
        sizes = [{}, {"a": 50.0} if number >= 6 else {}, {}]
        values, outcome = rounds.make(*(moved(values, index, **own) for index, own in enumerate(sizes)))
        if outcome.lasting:
            found[number - 5] = outcome.lasting
    assert list(found) == [10, 20] and list(found[10]) == ["p1"]
    assert re.fullmatch(
        r"it has been left out for 10 rounds running, now of 1 unit \(layer\.0\); in layer\.0 its norm is 5\d\.\d+, "
        r"the median of the others' 1\.\d+: look at its data, its learning rate and its hardware; if all is well "
        r"with it, raise ewma_threshold, or drop skip_anomaly",
        found[10]["p1"],
    )


def test_a_restarted_server_continues_counting_towards_a_new_level_and_its_history_has_it(make_service):
    service = make_service(peers=2, skip_anomaly=True, ewma_warmup_steps=4)
    server = service.start("round_committed:8")
    sizes = {str(number): {"layer.0.weight": 9.0} for number in range(7, 11)}
    peers = [service.peer(name, 10, values=sizes) for name in ("p0", "p1")]
    assert server.wait() != 0
    service.start()
    assert [peer.wait() for peer in peers] == [0, 0]
    told = [[list(service.seen(name)[number]["excluded"]) for number in range(7, 11)] for name in ("p0", "p1")]
    assert told == [[["layer.0.weight"]] * 3 + [[]]] * 2
    (event,) = [event for event in service.events("committed") if "new_levels" in event]
    assert event["round"] == 9 and set(event["new_levels"]) == {"p0", "p1"}
    for levels in event["new_levels"].values():
        ((unit, (before, now)),) = levels.items()
        assert unit == "layer.0.weight" and now > 10 * before
