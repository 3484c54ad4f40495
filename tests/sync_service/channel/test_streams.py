# SPDX-License-Identifier: Apache-2.0
"""Streams that run at the same time: one that fails ends the others."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.connection import Connection, ConnectionConfig
from megatron_ext.sync_service.channel.route import Route
from megatron_ext.sync_service.channel.streams import Streams
from megatron_ext.sync_service.peer.download import download
from megatron_ext.sync_service.peer.parts import whole_parts
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.wire import Upload
from tests.support.waiting import until
from tests.sync_service.links import MIB, VALUES, Link
from tests.sync_service.service import Service

MakeService = Callable[..., Service]


def test_nothing_is_written_any_more_once_a_download_was_refused(make_service: MakeService):
    service = make_service()
    service.start()
    unknown = {"unknown": torch.zeros(8 * MIB // 4)}
    memory = {name: torch.full_like(value, -1.0) for name, value in (VALUES | unknown).items()}
    with (
        service.client("p0", VALUES) as client,
        Link(int(service.address.rpartition(":")[2]), rate=2 * MIB) as relay,
        ThreadPoolExecutor(2) as pool,
    ):
        client.start(VALUES)
        route = Route(Connection(replace(client.config.connection, server=relay.address)))
        parts = whole_parts(Catalog.of_tensors(memory))
        with pytest.raises(UserError, match=r"refuses Download: .*unknown"):
            download(route, pool, client._membership.caller, parts, 0, 2, out=memory)
        then = {name: value.clone() for name, value in memory.items()}
        time.sleep(1)
        assert all(torch.equal(memory[name], value) for name, value in then.items())
        # The other stream was in flight, for 4 seconds.
        assert any((then[name] == -1.0).all() for name in VALUES)
        route.close()


def test_streams_that_wait_for_an_answer_or_to_try_again_end_with_the_first_that_fails(make_service: MakeService):
    service = make_service()
    service.start()
    begun: list[str] = []

    def work(connection: Connection, job: str) -> None:
        connection.again("Upload", lambda: once(connection, job), streams=streams)

    def once(connection: Connection, job: str) -> None:
        begun.append(job)
        if job == "refused":
            until(lambda: {"stuck", "away"} <= set(begun), "the other streams")
            raise UserError("this is why")
        message = Upload(caller=pb2.Caller(), round=1, frames=[])
        connection.send("Upload", never() if job == "stuck" else iter([message]), streams)

    def never() -> Iterator[Any]:
        until(lambda: False, "nothing", 3600.0)
        yield

    with ThreadPoolExecutor(3) as pool:
        streams = Streams(pool)
        here, away = (Connection(ConnectionConfig(server=address)) for address in (service.address, "127.0.0.1:1"))
        route = Route(here)
        route.connections = [here, away]
        begin = time.monotonic()
        with pytest.raises(UserError, match="this is why"):
            streams.run(route, [["stuck", "refused"], ["away"]], work)
        assert time.monotonic() - begin < 60.0  # not the minutes that either may take
        assert streams.is_ended
        assert begun.count("refused") == 1
