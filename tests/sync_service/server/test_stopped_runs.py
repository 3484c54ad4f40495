# SPDX-License-Identifier: Apache-2.0
"""A run that stops at an error of its own takes no other run with it."""

from collections.abc import Callable
from typing import Any

from megatron_ext.cli.main import main
from megatron_ext.sync_service.channel.connection import Connection, ConnectionConfig
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.status_reply import read_status
from tests.support.waiting import until
from tests.sync_service.service import Service
from tests.sync_service.whole_runs import FRAGILE, LARGE, ROUNDS

MakeService = Callable[..., Service]


def test_a_run_that_stops_takes_no_other_with_it_and_resumes_after_a_new_start(make_service: MakeService):
    service = make_service({"stopped": FRAGILE, "other": {"peers": 1}})
    server = service.start()
    peer = service.peer("p0", ROUNDS, values=LARGE)
    until(lambda: "run stopped has stopped" in service.output, "the end of the run")
    assert service.peer("p1", ROUNDS, run="other").wait() == 0
    stopped, other = status_of(service)
    assert stopped["problem"] == (
        "the run has stopped at round 1 (ZeroDivisionError: one half); when its cause is fixed (the server's log has "
        "more), start the server again"
    )
    assert (stopped["newest_round"], other["newest_round"], other["problem"]) == (0, ROUNDS, "")
    # There is nothing to wait for.
    assert main(["server", "drain", "--server", service.address]) == 0
    assert server.wait() == 1
    assert "RuntimeError: run stopped has stopped" in service.output
    assert peer.exit_code is None, peer.output
    service.runs["stopped"] = {**FRAGILE, "outer_optimizer_lr": 0.7}
    service.start()
    assert peer.wait() == 0, peer.output + service.output
    assert service.seen("p0").keys() == set(range(ROUNDS + 1))


def test_a_server_whose_runs_have_all_stopped_ends(make_service: MakeService):
    service = make_service(**FRAGILE)
    server = service.start()
    service.peer("p0", ROUNDS, values=LARGE)
    assert server.wait() == 1
    assert "ZeroDivisionError: one half" in service.output


def status_of(service: Service) -> list[dict[str, Any]]:
    """Return what the server says of its runs."""
    connection = Connection(ConnectionConfig(server=service.address, patience_seconds=20))
    reply = connection.call("Status", pb2.StatusRequest())
    connection.close()
    return read_status(reply)["runs"]
