# SPDX-License-Identifier: Apache-2.0
"""Connections that nobody needs take nothing that peers, people and the server's files need."""

import errno
import logging
import re
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from megatron_ext.errors import UserError
from megatron_ext.sync_service.callers.connections import Connections
from megatron_ext.sync_service.disk.durable import described
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.wire import METHODS
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.server.config import ServerConfig
from tests.support.waiting import until
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import start_values

MakeService = Callable[..., Service]
START = start_values(1)
TOKEN = "0123456789-0123456789"
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
PING, SETTINGS, IS_ANSWER = 6, 4, 1


class Strangers:
    """Connections from one process that greet, answer the server's pings, and make no call."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._server = host, int(port)
        self._selector = selectors.DefaultSelector()
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = []
        self.is_returning = False
        self.hung_up = 0
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def connect(self, count: int) -> None:
        """Open `count` of them."""
        for _ in range(count):
            self._connect()

    def close(self) -> None:
        """End all of them."""
        self._ended.set()
        self._thread.join()
        for found in self._sockets:
            found.close()

    def _connect(self) -> None:
        found = socket.create_connection(self._server, 60)
        self._sockets.append(found)
        with suppress(OSError):  # closed by the server already
            found.sendall(GREETING)
        self._selector.register(found, selectors.EVENT_READ)

    def _answer(self) -> None:
        while not self._ended.is_set():
            for key, _ in self._selector.select(0.1):
                found = key.fileobj
                assert isinstance(found, socket.socket)
                if not _has_answered(found):
                    self._selector.unregister(found)
                    found.close()
                    self.hung_up += 1
                    if self.is_returning:
                        self._connect()


def _has_answered(found: socket.socket) -> bool:
    """Answer what the server has said at a connection; False once it is over."""
    try:
        said = found.recv(1 << 16)
        while len(said) >= 9:
            size, kind, flags = int.from_bytes(said[:3], "big"), said[3], said[4]
            if kind in (PING, SETTINGS) and not flags & IS_ANSWER:
                payload = said[9 : 9 + size] if kind == PING else b""
                found.sendall(len(payload).to_bytes(3, "big") + bytes([kind, IS_ANSWER, 0, 0, 0, 0]) + payload)
            said = said[9 + size :]
            if not said:
                return True
    except OSError:
        return False
    return bool(said)


@contextmanager
def strangers_at(service: Service) -> Iterator[Strangers]:
    found = Strangers(service.address)
    try:
        yield found
    finally:
        found.close()


def status_through_a_new_connection(service: Service) -> None:
    """Ask for the status until it comes, which a caller that is refused a place does by itself."""

    def has_come() -> bool:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(service.address, options) as channel:
            call: Any = channel.unary_unary(METHODS + "Status")
            with suppress(grpc.RpcError):
                shown = [("authorization", f"Bearer {TOKEN}")]
                call(pb2.StatusRequest().SerializeToString(), timeout=10, metadata=shown)
                return True
        return False

    until(has_come, "the status")


def guarded(make_service: MakeService, tmp_path: Path, **extra: Any) -> tuple[Service, dict[str, str]]:
    """Return a service that asks for a token, and what a client needs to show it."""
    (tmp_path / "token").write_text(TOKEN)
    service = make_service(peers=1)
    service.extra = {"token_file": str(tmp_path / "token"), **extra}
    return service, {"token_file": str(tmp_path / "token")}


def test_idle_connections_take_neither_descriptors_nor_places_of_peers_and_people(
    make_service: MakeService, tmp_path: Path
):
    # So long that no connection ends by itself while the test lasts.
    service, connection = guarded(make_service, tmp_path, idle_seconds=3600.0)
    server = service.start(descriptors=(300, 300))
    assert re.search(r"room for 150 connections, of which an address has 37 .* 150 of the process' 300", service.output)
    with strangers_at(service) as strangers, service.client("p0", START, connection=connection) as client:
        client.start(START)
        strangers.connect(400)
        until(lambda: strangers.hung_up >= 400 - 37, "the end of most of them")
        for _ in range(3):
            status_through_a_new_connection(service)
            client.sync(START)
        # Some are held all the time, and the server has its descriptors.
        assert strangers.hung_up < 400 and server.descriptors < 150
        until(lambda: "shown no token" in service.output, "the server's word")
        assert "connections of 127.0.0.1 that have shown no token" in service.output
    assert "Too many open files" not in service.output


def test_connections_that_return_whenever_they_are_ended_keep_nobody_out(make_service: MakeService, tmp_path: Path):
    service, connection = guarded(make_service, tmp_path, idle_seconds=3600.0)
    service.start(descriptors=(300, 300))
    with strangers_at(service) as strangers, service.client("p0", START, connection=connection) as client:
        client.start(START)
        strangers.is_returning = True
        strangers.connect(100)  # below what all have, and above what an address has
        until(lambda: strangers.hung_up >= 100, "their return")
        status_through_a_new_connection(service)
        client.sync(START)


def test_a_connection_without_a_call_ends_and_a_peers_comes_back_by_itself(make_service: MakeService, tmp_path: Path):
    service, connection = guarded(make_service, tmp_path, idle_seconds=0.5)
    service.start()
    with strangers_at(service) as strangers, service.client("p0", START, connection=connection) as client:
        client.start(START)
        for number in range(2):
            strangers.connect(20)
            until(lambda number=number: strangers.hung_up == 20 * (number + 1), "the end of the idle ones")
            client.sync(START)
    assert service.output.count("'peer': 'p0'") >= 1 and "hung up" not in service.output


@contextmanager
def shown(service: Service, count: int) -> Iterator[list[list[grpc.ChannelConnectivity]]]:
    """Hold connections that have shown the token, and yield how each has fared, from its first call on."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.insecure_channel(service.address, options) for _ in range(count)]
    fared: list[list[grpc.ChannelConnectivity]] = [[] for _ in channels]
    try:
        for channel, states in zip(channels, fared, strict=True):
            call: Any = channel.unary_unary(METHODS + "Status")
            metadata = [("authorization", f"Bearer {TOKEN}")]
            call(pb2.StatusRequest().SerializeToString(), timeout=60, metadata=metadata, wait_for_ready=True)
            channel.subscribe(states.append)
        until(lambda: all(fared), "the states of the connections")
        yield fared
    finally:
        for channel in channels:
            channel.close()


def test_connections_that_have_shown_the_token_are_not_hung_up(make_service: MakeService, tmp_path: Path):
    service, _ = guarded(make_service, tmp_path, connections=20, idle_seconds=3600.0)
    service.start()
    with shown(service, 8) as fared, strangers_at(service) as strangers:  # an address has 5 otherwise
        strangers.connect(8)
        until(lambda: strangers.hung_up == 3, "the end of the strangers' oldest")
        assert all(states == [grpc.ChannelConnectivity.READY] for states in fared)


def test_more_connections_than_there_may_be_are_refused_and_the_others_stay(make_service: MakeService, tmp_path: Path):
    service, _ = guarded(make_service, tmp_path, connections=20, idle_seconds=3600.0)
    server = service.start()
    with shown(service, 20) as fared, strangers_at(service) as strangers:
        before = server.descriptors
        strangers.connect(8)
        until(lambda: strangers.hung_up == 8, "the refusal of those that are too many")
        assert all(states == [grpc.ChannelConnectivity.READY] for states in fared)
        assert server.descriptors <= before
        until(lambda: "connections are taken" in service.output, "the server's word")
        assert "20 of 20 connections are taken, further ones are closed; raise connections or" in service.output
    assert "hung up" not in service.output


def test_the_soft_limit_is_raised_and_too_low_a_hard_one_is_refused_in_one_line(
    make_service: MakeService, tmp_path: Path
):
    service, _ = guarded(make_service, tmp_path)
    service.start(descriptors=(64, 1000))
    assert "room for 850 connections" in service.output
    service.server.kill()
    service.server.wait()
    assert service.start(descriptors=(64, 160)).wait() == 2
    said = [line for line in service.output.splitlines() if "error:" in line]
    assert len(said) == 1 and "Traceback" not in service.output
    assert "the process may have 160 file descriptors, and its runs need 168" in said[0] and "ulimit -Hn" in said[0]
    service.extra["connections"] = 17
    assert service.start().wait() == 2
    assert "connections is 17, and 18 are the least for 1 places of peers of one rank each; raise it" in service.output


def test_a_time_in_which_no_call_can_come_is_refused_in_the_configuration():
    with pytest.raises(UserError, match=r"idle_seconds is 0\.0; it must be above 0"):
        ServerConfig(dir="x", runs={"r": RunConfig(peers=1)}, idle_seconds=0.0).check()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_oldest_strangers_of_an_address_are_hung_up_and_other_sockets_left_alone(
    family: socket.AddressFamily, caplog: pytest.LogCaptureFixture
):
    local = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((local, 0), family=family) as listening, socket.create_server(("127.0.0.1", 0)) as other:
        connections = Connections(listening.getsockname()[1], 100, 2)
        pairs = []
        for at in (listening, listening, listening, listening, other, other, other):
            near = socket.create_connection(at.getsockname()[:2])
            pairs.append((near, at.accept()[0]))
            connections.look() if len(pairs) < 4 else None
            if len(pairs) == 1:
                address, port = near.getsockname()[:2]
                name = f"ipv4:{address}:{port}" if family == socket.AF_INET else f"ipv6:%5B{address}%5D:{port}"
                connections.know(name)
        with caplog.at_level(logging.WARNING):
            connections.look()
        hung_up = []
        for near, _ in pairs:
            near.setblocking(False)
            try:
                hung_up.append(near.recv(1) == b"")
            except BlockingIOError:
                hung_up.append(False)
        assert hung_up == [False, True, False, False, False, False, False]
        assert f"connections of {local} that have shown no token" in caplog.text
        for pair in pairs:
            for found in pair:
                found.close()


def test_that_all_connections_are_taken_is_said_once_a_minute(caplog: pytest.LogCaptureFixture):
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
        connections = Connections(listening.getsockname()[1], 2, 2)
        for taken in (1, 2):
            assert not caplog.records
            stack.enter_context(socket.create_connection(listening.getsockname()))
            stack.enter_context(listening.accept()[0])
            for _ in range(3):
                connections.look()
            assert len(caplog.records) == taken - 1
        assert caplog.text.count("2 of 2 connections are taken, further ones are closed; raise connections or") == 1
        for _ in range(58):
            connections.look()
        assert len(caplog.records) == 2


def test_the_addresses_of_a_name_have_connections_of_their_own(caplog: pytest.LogCaptureFixture):
    with ExitStack() as stack:
        first = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = first.getsockname()[1]
        second = stack.enter_context(socket.create_server(("::1", port), family=socket.AF_INET6))
        connections = Connections(port, 2, 2)
        for listening, all_taken in ((first, False), (second, False), (second, True)):
            stack.enter_context(socket.create_connection(listening.getsockname()[:2]))
            stack.enter_context(listening.accept()[0])
            connections.look()
            assert ("2 of 2 connections are taken" in caplog.text) == all_taken


def test_a_connection_that_shows_the_token_during_a_look_stays_known(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connections = Connections(listening.getsockname()[1], 100, 0)  # every stranger is hung up
        find = connections._found

        def found_before_it_came() -> Any:
            monkeypatch.setattr(connections, "_found", find)
            found = find()
            stack.enter_context(near := socket.create_connection(listening.getsockname()))
            stack.enter_context(listening.accept()[0])
            near.settimeout(0)
            here.append(near)
            connections.know("ipv4:{}:{}".format(*near.getsockname()))
            return found

        here: list[socket.socket] = []
        with ExitStack() as stack:
            monkeypatch.setattr(connections, "_found", found_before_it_came)
            for _ in range(3):
                connections.look()
            with pytest.raises(BlockingIOError):
                here[0].recv(1)  # it is open, and nothing was said
        connections.look()
        assert not connections._known  # nor is one that has ended kept


def test_too_many_open_files_send_nobody_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = described(OSError(errno.EMFILE, "Too many open files", "x"))
    assert "its disk is not the reason" in said and "LimitNOFILE" in said and "lower connections" in said
    assert described(OSError(errno.ENOSPC, "the disk is full")) == "[Errno 28] the disk is full"

    def refuse(*_: object, **__: object) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"cannot be opened: .* no file descriptor left"):
        Snapshot(tmp_path / "round-00000001.safetensors")
