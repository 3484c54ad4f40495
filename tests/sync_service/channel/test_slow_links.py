# SPDX-License-Identifier: Apache-2.0
"""Uploads and downloads over links that are slow, break, or fall silent: what gets through brings a peer forward."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from benchmarks.byte_relay import ByteRelay
from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from tests.sync_service.links import MIB, VALUES, Link
from tests.sync_service.service import Service

MakeService = Callable[..., Service]
PATIENCE = 5.0


@contextmanager
def joined_through(
    make_service: MakeService,
    *,
    values: dict[str, torch.Tensor] = VALUES,
    call_seconds: float = 1.0,
    streams: int = 1,
    **link: Any,
) -> Iterator[tuple[dict[str, torch.Tensor], Link]]:
    """Yield what a peer has downloaded that joins over a link, and the link."""
    service = make_service()
    service.start()
    relay = Link(int(service.address.rpartition(":")[2]), **link)
    impatient = {"server": relay.address, "patience_seconds": PATIENCE, "call_seconds": call_seconds}
    with relay, service.client("p0", values) as first:
        first.start(values)
        with service.client("p1", values, connection=impatient, streams=streams) as second:
            yield second.start({name: torch.zeros_like(value) for name, value in values.items()}), relay


def test_a_download_may_take_longer_than_any_call(make_service: MakeService):
    begin = time.monotonic()
    # A message of 1 MiB takes a fifth of what a call may be silent for.
    with joined_through(make_service, rate=8 * MIB / (1.2 * PATIENCE), call_seconds=0.8 * PATIENCE) as (taken, _):
        assert time.monotonic() - begin > PATIENCE  # which is longer than a call
        assert all(torch.equal(taken[name], value) for name, value in VALUES.items())


def publish_through(
    service: Service,
    relay: ByteRelay,
    values: dict[str, torch.Tensor],
    call_seconds: float,
    *,
    patience: float = PATIENCE,
    streams: int = 1,
) -> dict[str, torch.Tensor]:
    """Return what a peer begins with that uploads the start over a link, in one call of each stream."""
    impatient = {"server": relay.address, "patience_seconds": patience, "call_seconds": call_seconds}
    call_bytes = 32 * MIB // streams
    with service.client("p0", values, connection=impatient, streams=streams, call_bytes=call_bytes) as client:
        return client.start(values)


def test_an_upload_may_take_longer_than_any_call(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    # More than stands in the kernel's buffers, with which a call seems to be further than it is.
    values = {f"{name}.{part}": value for name, value in VALUES.items() for part in range(3)}
    begin = time.monotonic()
    with ByteRelay(int(service.address.rpartition(":")[2]), rate=2 * MIB) as relay:
        taken = publish_through(service, relay, values, 8.0)
    assert time.monotonic() - begin > 8.0
    assert all(torch.equal(taken[name], value) for name, value in values.items())
    (uploaded,) = service.events("uploaded")
    assert relay.up < 1.1 * uploaded["bytes"]  # once


def test_an_upload_that_nobody_takes_is_given_up(make_service: MakeService, caplog: pytest.LogCaptureFixture):
    class Stuck(ByteRelay):
        def _pass_on(self, source: socket.socket, target: socket.socket, is_up: bool) -> None:
            while is_up and self.up < MIB:
                data = source.recv(1 << 16)
                self.up += len(data)
                target.sendall(data)
            if is_up:
                over.wait()
            else:
                super()._pass_on(source, target, is_up)

    over = threading.Event()
    service = make_service(peers=1)
    service.start()
    with (
        Stuck(int(service.address.rpartition(":")[2])) as relay,
        pytest.raises(UserError, match=r"has not answered .* for \d+ s"),
    ):
        publish_through(service, relay, VALUES, 2.0)
    over.set()
    assert "Upload: DEADLINE_EXCEEDED (nothing has been taken for 2 s and more); trying again" in caplog.text


def test_a_server_that_is_far_away_is_reached_without_trying_again(
    make_service: MakeService, caplog: pytest.LogCaptureFixture
):
    class Distant(ByteRelay):
        def _pass_on(self, source: socket.socket, target: socket.socket, is_up: bool) -> None:
            time.sleep(0.6)  # before the first bytes of a connection: a handshake takes over a second
            super()._pass_on(source, target, is_up)

    values = {"layer": torch.ones(1000)}
    service = make_service(peers=1)
    service.start()
    with Distant(int(service.address.rpartition(":")[2])) as relay:
        taken = publish_through(service, relay, values, 20.0)
    assert torch.equal(taken["layer"], values["layer"])
    assert "trying again" not in caplog.text


def test_what_is_in_flight_to_a_server_that_is_far_away_is_the_window_of_a_stream(make_service: MakeService):
    values = {f"layer.{index}": torch.full((MIB,), float(index)) for index in range(4)}
    service = make_service(peers=1)
    service.extra = {"stream_window": 8 * MIB}
    service.start()
    with ByteRelay(int(service.address.rpartition(":")[2]), seconds=0.3) as relay:
        taken = publish_through(service, relay, values, 60.0)
    assert all(torch.equal(taken[name], value) for name, value in values.items())
    # Not all of it: gRPC tells the sender of room when much of it is free, and a busy machine sends less in that time.
    assert 1.5 * MIB < relay.most_in_flight < 9 * MIB


def test_what_has_come_before_a_link_broke_is_not_sent_again(make_service: MakeService):
    with joined_through(make_service, limit=3 * MIB) as (taken, relay):
        assert all(torch.equal(taken[name], value) for name, value in VALUES.items())
        # A connection loses what is in flight when it breaks, and brings at least one of three boxes.
        assert 8 * MIB < relay.down < 24 * MIB


def test_a_link_that_breaks_before_a_tensor_is_whole_brings_it_in_the_end(make_service: MakeService):
    values = {"layer": torch.arange(2.0 * MIB)}
    with joined_through(make_service, values=values, limit=3 * MIB) as (taken, relay):
        assert torch.equal(taken["layer"], values["layer"])
        assert relay.down < 24 * MIB


def test_a_link_that_breaks_before_a_call_is_whole_takes_the_upload_in_the_end(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    with Link(int(service.address.rpartition(":")[2]), up=True, limit=3 * MIB) as relay:
        taken = publish_through(service, relay, VALUES, 2.0)
        assert all(torch.equal(taken[name], value) for name, value in VALUES.items())
        assert relay.up < 32 * MIB


def test_a_call_that_took_longer_than_the_patience_is_tried_again_when_its_link_breaks(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    with Link(int(service.address.rpartition(":")[2]), up=True, rate=2 * MIB, limit=6 * MIB, failing=1) as relay:
        taken = publish_through(service, relay, VALUES, 8.0, patience=2.0)
    assert all(torch.equal(taken[name], value) for name, value in VALUES.items())


@pytest.mark.parametrize("streams", [1, 8])
@pytest.mark.parametrize("up", [False, True], ids=["download", "upload"])
def test_another_connection_is_opened_where_one_takes_everything_and_brings_nothing(
    make_service: MakeService, caplog: pytest.LogCaptureFixture, up: bool, streams: int
):
    # Eight streams find out after longer than they have patience for.
    silent = {"up": up, "limit": 2 * MIB, "then": "silence", "failing": 1}
    if up:
        service = make_service(peers=1)
        service.start()
        with Link(int(service.address.rpartition(":")[2]), **silent) as relay:
            taken = publish_through(service, relay, VALUES, 1.0, streams=streams)
    else:
        with joined_through(make_service, streams=streams, **silent) as (taken, _):
            pass
    assert all(torch.equal(taken[name], value) for name, value in VALUES.items())
    assert "load: DEADLINE_EXCEEDED" in caplog.text


def test_streams_that_wait_for_their_turn_on_a_busy_link_are_not_silent(
    make_service: MakeService, caplog: pytest.LogCaptureFixture
):
    # The messages of all streams come at the same time, after longer than a call may be silent for.
    rate, call_seconds = 2 * MIB, 1.0
    with joined_through(make_service, streams=8, rate=rate, call_seconds=call_seconds) as (taken, _):
        assert all(torch.equal(taken[name], value) for name, value in VALUES.items())
    assert "trying again" not in caplog.text


def test_a_link_that_falls_silent_is_given_up(make_service: MakeService, caplog: pytest.LogCaptureFixture):
    with (
        pytest.raises(UserError, match=r"has not answered .* for \d+ s"),
        joined_through(make_service, limit=MIB // 2, then="silence"),
    ):
        pass
    assert "Download: DEADLINE_EXCEEDED (nothing has come for 1 s and more); trying again" in caplog.text


def test_a_drained_server_waits_for_downloads_that_have_begun(make_service: MakeService):
    service = make_service()
    server = service.start()
    relay = Link(int(service.address.rpartition(":")[2]), rate=2 * MIB)

    def drain() -> None:
        while relay.down < MIB:
            time.sleep(0.01)
        drained.append(main(["server", "drain", "--server", service.address]))

    drained: list[int] = []
    other = threading.Thread(target=drain)
    with relay, service.client("p0", VALUES) as first:
        first.start(VALUES)
        other.start()
        with service.client("p1", VALUES, connection={"server": relay.address}, streams=2) as second:
            # Longer than the grace that a server has which ends.
            taken = second.start({name: torch.zeros_like(value) for name, value in VALUES.items()})
            assert all(torch.equal(taken[name], value) for name, value in VALUES.items())
            other.join()
            assert drained == [0] and server.wait() == 0
