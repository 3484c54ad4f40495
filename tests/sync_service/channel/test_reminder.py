# SPDX-License-Identifier: Apache-2.0
"""A long wait is told after a minute, and then ever more rarely."""

from collections.abc import Callable

import pytest

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel import reminder
from megatron_ext.sync_service.channel.connection import Connection, ConnectionConfig
from megatron_ext.sync_service.channel.reminder import Reminder
from megatron_ext.sync_service.protocol.protocol import pb2
from tests.support.ports import free_port
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import start_values, trained


def test_a_wait_of_an_hour_is_told_six_times():
    found = Reminder()
    assert [second for second in range(3600) if found.is_due(second)] == [60, 120, 240, 480, 960, 1920]


def test_an_outage_that_lasts_is_told_again_with_its_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reminder, "_FIRST_SECONDS", 0.5)
    connection = Connection(ConnectionConfig(server=f"127.0.0.1:{free_port()}", patience_seconds=3))
    with pytest.raises(UserError, match="has not answered Status for"):
        connection.call("Status", pb2.StatusRequest())
    connection.close()
    first, *further = [record.getMessage() for record in caplog.records]
    assert first.startswith("Status: UNAVAILABLE (") and first.endswith("; trying again")
    assert 1 <= len(further) <= 3
    assert all("Connection refused" in said and said.endswith(" s by now") for said in further)


def test_a_peer_says_what_its_round_waits_for(
    make_service: Callable[..., Service], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reminder, "_FIRST_SECONDS", 0.5)
    service = make_service()
    service.start()
    start = start_values(7)
    with service.client("p0", start, index=0, round_seconds=2, connection={"call_seconds": 0.7}) as p0:
        sent = trained(p0.start(start), 0, 1)
        p0.upload(1, sent)
        with pytest.raises(UserError, match="round 1 has not come in 2 s"):
            p0.fetch(1, sent)
    told = [record.getMessage() for record in caplog.records]
    because = "round 1 needs 1 more of its quorum of 2 (more peers have to register)"
    assert told and all(said.startswith("round 1 has not come in ") and said.endswith(because) for said in told)
