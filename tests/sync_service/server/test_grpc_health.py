# SPDX-License-Identifier: Apache-2.0
"""gRPC's health service, asked as a probe asks: without a token, about the server and about a run."""

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.waiting import until
from tests.sync_service.service import Service
from tests.sync_service.whole_runs import FRAGILE, LARGE

MakeService = Callable[..., Service]


def health_of(service: Service, name: str = "") -> str:
    with grpc.insecure_channel(service.address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def test_a_probe_needs_no_token_and_learns_of_no_other_runs(make_service: MakeService, tmp_path: Path):
    (tmp_path / "token").write_text("0123456789-0123456789\n")
    service = make_service(peers=1)
    service.extra = {"token_file": str(tmp_path / "token")}
    service.start()
    assert health_of(service) == health_of(service, "demo") == "SERVING"
    with pytest.raises(grpc.RpcError) as caught:
        health_of(service, "other")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_run_that_has_stopped_does_not_serve(make_service: MakeService):
    service = make_service({"stopped": FRAGILE, "other": {"peers": 1}})
    service.start()
    assert health_of(service, "stopped") == "SERVING"
    service.peer("p0", 3, values=LARGE)
    until(lambda: "run stopped has stopped" in service.output, "the end of the run")
    until(lambda: health_of(service, "stopped") == "NOT_SERVING", "the word of it")
    assert health_of(service) == health_of(service, "other") == "SERVING"
