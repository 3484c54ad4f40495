# SPDX-License-Identifier: Apache-2.0
"""Until when a peer's process counts as alive."""

import math
import time

import pytest

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
