# SPDX-License-Identifier: Apache-2.0
"""Until when a peer's process counts as alive."""

import math
import time

import pytest

from megatron_ext.sync_service.rounds import presence as module
from megatron_ext.sync_service.rounds.presence import Presence


def test_the_time_until_which_a_process_counts_as_alive_moves_with_its_words_alone():
    presence = Presence()
    presence.heard("p0")
    presence.begins("p0", 60.0)
    until = presence.alive_until("p0")
    assert until is not None and until == pytest.approx(time.monotonic() + 60.0, abs=5.0)
    time.sleep(0.01)
    assert presence.alive_until("p0") == until
    presence.heard("p0")
    assert (presence.alive_until("p0") or 0.0) > until


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_process_that_gives_no_time_does_not_count_as_alive(seconds: float):
    presence = Presence()
    presence.heard("p0")
    presence.begins("p0", seconds)
    assert presence.alive_until("p0") is None and not presence.is_known("p0")


def test_a_process_that_gives_its_place_up_is_gone_at_once():
    presence = Presence()
    presence.heard("p0")
    presence.begins("p0", 60.0)
    presence.says("p0", 0.0)
    assert presence.alive_until("p0") is None and presence.is_known("p0")


def test_who_stops_sending_heartbeats_is_gone_and_that_is_told_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LEAST_SILENCE", 0.02)
    presence = Presence()
    for peer, seconds in (("short", 0.05), ("long", 60.0), ("silent", 0.0), ("ended", 0.05)):
        presence.heard(peer)
        presence.begins(peer, seconds)
    presence.says("ended", 0.0)
    everybody = ["short", "long", "silent", "ended"]
    assert presence.silent(everybody) == [] and presence.told(everybody) == ""
    time.sleep(0.1)
    assert presence.silent(everybody) == ["short"]
    assert presence.told(everybody) == "no heartbeat from short for 0 s"
    assert [presence.newly_silent(everybody), presence.newly_silent(everybody)] == [["short"], []]
    presence.heard("short")
    time.sleep(0.1)
    assert presence.newly_silent(everybody) == ["short"]
    assert presence.gone_from("silent") == math.inf
    assert presence.gone_from("ended") < time.monotonic()


def test_no_process_is_gone_within_seconds_however_often_it_sends_heartbeats():
    presence = Presence()
    presence.heard("p0")
    presence.begins("p0", 0.01)
    time.sleep(0.05)
    assert presence.alive_until("p0") is None and presence.silent(["p0"]) == []
    assert presence.gone_from("p0") == pytest.approx(time.monotonic() + module.LEAST_SILENCE, abs=2.0)


def test_nobody_was_silent_while_the_server_stood_still(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LEAST_SILENCE", 0.02)
    presence = Presence()
    presence.heard("p0")
    presence.begins("p0", 0.05)
    time.sleep(0.1)
    presence.was_deaf()
    assert presence.silent(["p0"]) == [] and presence.alive_until("p0") is not None
    time.sleep(0.1)
    assert presence.silent(["p0"]) == ["p0"]
