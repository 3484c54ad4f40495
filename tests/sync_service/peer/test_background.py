# SPDX-License-Identifier: Apache-2.0
"""What becomes of steps that a peer makes while its round is in flight, and of the thread that makes it."""

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.connection import Connection, ConnectionConfig
from megatron_ext.sync_service.peer.background import ThreadedRound, uncounted, with_steps_since
from megatron_ext.sync_service.peer.client import RoundOutcome
from megatron_ext.sync_service.peer.parts import Part
from megatron_ext.sync_service.protocol.catalog import TensorSpec
from megatron_ext.sync_service.protocol.frames import Box
from megatron_ext.sync_service.protocol.protocol import pb2

numbers = st.integers(-100, 100)


def outcome(**changes) -> RoundOutcome:
    given = {"number": 1, "values": {}, "contributed": True, "contributors": ("a",), "message": "", "excluded": {}}
    return RoundOutcome(**{**given, "sent": 0, "received": 0, **changes})


def part(name: str, unit: str, owners: tuple[int, ...] = ()) -> Part:
    spec = TensorSpec(name=name, shape=(2,), unit=unit, owners=owners)
    return Part(key=name, spec=spec, box=Box((0,), (2,)), is_primary=True)


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1))
def test_steps_made_since_are_kept_and_counted_once(triples):
    result, own, contributed = ({"w": torch.tensor(side, dtype=torch.float32)} for side in zip(*triples, strict=True))
    begun = {"w": contributed["w"].clone()}
    found = with_steps_since(result, own, contributed)["w"]
    assert found.tolist() == [r + now - then for r, now, then in triples]
    # What the next contribution is compared with, R, is a later step away by exactly the steps since this one.
    assert (found - result["w"]).tolist() == (own["w"] - begun["w"]).tolist()


def test_what_is_frozen_or_did_not_count_is_as_in_the_round():
    result = {name: torch.full((2,), 10.0) for name in ("trained", "left out", "frozen")}
    contributed = {name: torch.full((2,), 2.0) for name in ("trained", "left out")}
    own = {"trained": torch.full((2,), 5.0), "left out": torch.full((2,), torch.nan)}
    found = with_steps_since(result, own, contributed, {"left out"})
    assert {name: values.tolist() for name, values in found.items()} == {
        "trained": [13.0, 13.0],
        "left out": [10.0, 10.0],
        "frozen": [10.0, 10.0],
    }


def test_results_that_share_memory_are_moved_once():
    shared = torch.full((2,), 10.0)
    own, contributed = torch.full((2,), 5.0), torch.full((2,), 2.0)
    both = {"tied": shared, "copy": shared}
    found = with_steps_since(both, dict.fromkeys(both, own), dict.fromkeys(both, contributed))
    assert found["tied"].tolist() == found["copy"].tolist() == [13.0, 13.0]


def test_a_contribution_is_left_out_as_a_whole_or_by_units():
    parts = [part("x", "layer.0"), part("y", "layer.0"), part("z", "layer.1")]
    assert uncounted(parts, outcome()) == set()
    assert uncounted(parts, outcome(excluded={"layer.0": "its norm"})) == {"x", "y"}
    assert uncounted(parts, outcome(contributed=False)) == {"x", "y", "z"}
    # A unit's experts are judged by themselves, and so is what is in no unit.
    parts = [part("x", "layer.0"), part("e", "layer.0", owners=(0,)), part("n", "")]
    assert uncounted(parts, outcome(excluded={"layer.0": "its norm"})) == {"x"}
    assert uncounted(parts, outcome(excluded={"layer.0 (its own experts)": "its norm"})) == {"e"}
    assert uncounted(parts, outcome(excluded={"n": "its norm"})) == {"n"}


def test_a_round_is_made_in_the_background_and_is_waited_for():
    released = threading.Event()

    def make() -> RoundOutcome:
        assert released.wait(60)
        return outcome(number=7)

    values = {"w": torch.zeros(2)}
    in_flight = ThreadedRound(make, values)
    assert in_flight.contributed is values
    released.set()
    found, seconds = in_flight.wait()
    assert found.number == 7 and seconds >= 0


@pytest.mark.parametrize("error", [UserError("the server is draining"), RuntimeError("a rank is gone")])
def test_what_goes_wrong_in_the_background_is_raised_where_the_round_is_awaited(error):
    def make() -> RoundOutcome:
        raise error

    with pytest.raises(type(error), match=str(error)):
        ThreadedRound(make, {}).wait()


def test_a_call_that_is_tried_again_ends_when_it_is_abandoned():
    connection = Connection(ConnectionConfig(server="127.0.0.1:1", patience_seconds=3600))
    tried = threading.Event()

    def request() -> Any:
        tried.set()
        return pb2.RegisterRequest()

    def make() -> RoundOutcome:
        connection.call("Register", request)
        return outcome()

    in_flight = ThreadedRound(make, {})
    assert tried.wait(60)
    connection.abandon()
    with pytest.raises(UserError, match="the call was given up, because this job ends"):
        in_flight.wait()
