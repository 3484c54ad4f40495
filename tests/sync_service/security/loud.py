# SPDX-License-Identifier: Apache-2.0
"""A server and a peer that log everything that Python's logging lets them say, for the process that forks them."""

import asyncio
import faulthandler
import logging
from typing import Any

from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.connection import ConnectionConfig
from megatron_ext.sync_service.peer.client import ClientConfig, Report, SyncClient
from tests.sync_service.toy_peer import start_values, trained


def _speak_up() -> None:
    faulthandler.enable()
    logging.basicConfig(level=logging.DEBUG, format="%(name)s %(funcName)s %(levelname)s %(message)s", force=True)
    logging.raiseExceptions = True
    for name in list(logging.root.manager.loggerDict):
        logging.getLogger(name).setLevel(logging.DEBUG)
    asyncio.set_event_loop_policy(_WithDebugging())


class _WithDebugging(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Return a loop that reports what it does."""
        loop = super().new_event_loop()
        loop.set_debug(True)
        return loop


def serve(argv: list[str]) -> int:
    """Run the command line."""
    _speak_up()
    return main(argv)


def train(job: dict[str, Any]) -> int:
    """Make `rounds` rounds as the peer `name`, over the `connection`."""
    _speak_up()
    values = start_values(1)
    connection = ConnectionConfig(**job["connection"])
    print(connection, flush=True)
    config = ClientConfig(connection=connection, run="demo", peer=job["name"])
    try:
        with SyncClient(config, values) as client:
            values = client.start(values)
            for number in range(client.round, job["rounds"]):
                values = client.sync(trained(values, client.index, number), Report(loss=1.0, steps=1)).values
    except UserError as error:
        print(error, flush=True)
        return 2
    return 0
