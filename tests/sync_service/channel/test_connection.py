# SPDX-License-Identifier: Apache-2.0
"""Calls that do not reach a sync server: through proxies of the environment, and to something else."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.connection import Connection, ConnectionConfig
from megatron_ext.sync_service.channel.proxy import proxy_variable
from megatron_ext.sync_service.protocol.protocol import grpc, pb2
from tests.support.waiting import until
from tests.sync_service.links import Link
from tests.sync_service.service import Service, refusal

HOST = "sync.example.org"
ELSEWHERE = f"{HOST}:50051"
PROXY = "http://proxy:80"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no proxy of the machine's in the environment."""
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield where a proxy, the one of the environment, was asked to lead; it refuses."""

    class Refusing(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            found.append(self.path)
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    found: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as proxy:
        Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_address[1]}")
        yield found
        proxy.shutdown()


def test_a_server_on_this_machine_is_reached_without_the_proxy(make_service: Callable[..., Service], asked: list[str]):
    service = make_service(peers=1)
    service.start()
    connection = Connection(ConnectionConfig(server=service.address, patience_seconds=20.0))
    assert connection.call("Status", pb2.StatusRequest()).runs
    connection.close()
    assert not asked


def test_a_proxy_that_does_not_lead_to_the_server_is_named(asked: list[str]):
    said = refusal(ELSEWHERE, 0.5, insecure=True)
    assert "HTTP proxy returned response code 403" in said
    assert "the proxy of the environment variable http_proxy leads there" in said
    assert "(else add sync.example.org to no_proxy)" in said
    assert ELSEWHERE in asked


@pytest.mark.parametrize(
    ("host", "environment", "variable"),
    [
        (HOST, {}, None),
        (HOST, {"HTTP_PROXY": PROXY, "http_proxy": ""}, None),
        (HOST, {"http_proxy": PROXY}, "http_proxy"),
        (HOST, {"http_proxy": PROXY, "grpc_proxy": "http://proxy:81"}, "grpc_proxy"),
        (HOST, {"https_proxy": PROXY, "no_proxy": "localhost, example.org"}, None),
        (HOST, {"https_proxy": PROXY, "no_proxy": "example.com,10.0.0.0/8"}, "https_proxy"),
        (HOST, {"https_proxy": PROXY, "no_proxy": "example.org", "no_grpc_proxy": "other"}, "https_proxy"),
        ("10.1.2.3", {"grpc_proxy": PROXY, "no_grpc_proxy": "10.0.0.0/8,fd00::/8"}, None),
        ("[fd00::1]", {"grpc_proxy": PROXY, "no_grpc_proxy": "10.0.0.0/8,fd00::/8"}, None),
        ("11.1.2.3", {"grpc_proxy": PROXY, "no_grpc_proxy": "10.0.0.0/8,fd00::/8"}, "grpc_proxy"),
    ],
)
def test_the_proxy_is_the_one_that_grpc_would_take(
    monkeypatch: pytest.MonkeyPatch, host: str, environment: dict[str, str], variable: str | None
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert proxy_variable(host) == variable


def test_something_else_that_listens_is_told_from_a_server_that_is_away():
    other = grpc.server(ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    said = refusal(f"127.0.0.1:{port}")
    other.stop(None)
    assert "does not know Status (Method not found!): something else listens there" in said


def test_a_connection_on_which_nothing_has_ever_come_is_given_up_at_once(make_service: Callable[..., Service]):
    service = make_service(peers=1)
    service.start()
    with Link(int(service.address.rpartition(":")[2]), up=True, limit=0, then="silence", failing=1) as relay:
        # A second try on the same one would be the last.
        connection = Connection(ConnectionConfig(server=relay.address, patience_seconds=1.0))
        assert connection.call("Status", pb2.StatusRequest(), seconds=2.0).runs
        connection.close()


def test_connections_that_were_given_up_are_closed(make_service: Callable[..., Service]):
    def sockets() -> int:
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum(link.startswith("socket:") for link in links)

    service = make_service(peers=1)
    service.start()
    with Link(int(service.address.rpartition(":")[2]), up=True, limit=0, then="silence") as relay:
        before = sockets()
        connection = Connection(ConnectionConfig(server=relay.address, patience_seconds=4.0))
        with pytest.raises(UserError, match="has not answered Status"):
            connection.call("Status", pb2.StatusRequest(), seconds=0.2)
        # The last one is not closed, and there are both ends of it and of the relay's other side.
        until(lambda: sockets() <= before + 4, "the end of connections", 10.0)
        connection.close()


def test_a_call_whose_connection_another_thread_closes_continues_or_is_given_up(make_service: Callable[..., Service]):
    service = make_service(peers=1)
    service.start()
    connection = Connection(ConnectionConfig(server=service.address))

    def closing(close: Callable[[], None]) -> Callable[[], pb2.StatusRequest]:
        def request() -> pb2.StatusRequest:
            closings.append(1)
            if len(closings) == 1:
                close()
            return pb2.StatusRequest()

        closings: list[int] = []
        return request

    assert connection.call("Status", closing(connection.close)).runs
    with pytest.raises(UserError, match="the call was given up, because this job ends"):
        connection.call("Status", closing(connection.abandon))
