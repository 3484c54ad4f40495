# SPDX-License-Identifier: Apache-2.0
"""Who may call which method: one decision for each method of the protocol, held against real servers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.sync_service.protocol import wire
from megatron_ext.sync_service.protocol.frames import Frame, whole_box
from megatron_ext.sync_service.protocol.protocol import PROTOCOL_VERSION, grpc, pb2
from tests.sync_service.authority import Authority
from tests.sync_service.cluster import Cluster
from tests.sync_service.service import Service
from tests.sync_service.shard_caller import calling, shard_request, shown
from tests.sync_service.shards import test_shard_calls
from tests.sync_service.toy_peer import digest, start_values

MakeService = Callable[..., Service]
Code = grpc.StatusCode
START = start_values(1)
TOKEN, SECRET = "token-of-the-peers", "secret-of-the-servers"

WHO = {
    "Register": "anybody who is let in",
    "Status": "anybody who is let in",
    "Resume": "the process that speaks for the peer",
    "Heartbeat": "the process that speaks for the peer",
    "Upload": "the process that speaks for the peer",
    "Commit": "the process that speaks for the peer",
    "Await": "the process that speaks for the peer",
    "Download": "the process that speaks for the peer",
    "Leave": "the process that speaks for the peer",
    "Evict": "an operator",
    "Drain": "an operator",
    "Shard": "the first server",
}
"""By method. A new one needs a line here, in `request_of`, and a row in docs/security.md."""

OF_PEERS = sorted(name for name, who in WHO.items() if who == "the process that speaks for the peer")
AT_EVERY_SERVER = {"Upload", "Download"}


def request_of(method: str, instance: str, peer: str = "p0") -> bytes:
    """Return a request that would be answered if the right one made it."""
    caller = {} if WHO[method] in ("an operator", "the first server") else {"run": "demo", "peer": peer}
    if caller:
        caller["instance"] = instance
    if method == "Upload":
        (name, values), *_ = START.items()
        shape = tuple(values.shape)
        frame = Frame.make(name, shape, whole_box(shape), 0, values.flatten() + 1)
        return wire.pack(wire.Upload(caller=pb2.Caller(**caller), round=1, frames=[frame]))
    fields: dict[str, Any] = {
        "Register": {"protocol": PROTOCOL_VERSION},
        "Heartbeat": {"alive_seconds": 1.0},
        "Commit": {"round": 1},
        "Await": {"round": 0},
        "Download": {"round": 0, "slices": [pb2.Slice(name="scale")]},
        "Evict": {"run": "demo", "peer": peer},
    }.get(method, {})
    if method == "Shard":
        return bytes(shard_request("seal", {"peer": peer, "instance": instance}).SerializeToString())
    if method not in ("Status", "Evict", "Drain"):
        fields["caller"] = pb2.Caller(**caller)
    return bytes(getattr(pb2, f"{method}Request")(**fields).SerializeToString())


def test_every_method_of_the_protocol_has_a_decision_and_the_page_has_it():
    methods = pb2.DESCRIPTOR.services_by_name["SyncService"].methods
    assert {method.name for method in methods} == set(WHO)
    page = (Path(__file__).resolve().parents[3] / "docs" / "security.md").read_text(encoding="utf-8")
    for method, who in WHO.items():
        assert any(f"`{method}`" in line and f"| {who} |" in line for line in page.splitlines()), method


def test_every_call_between_servers_is_tried_with_every_other_value():
    calls = {field.name for field in pb2.ShardRequest.DESCRIPTOR.oneofs_by_name["call"].fields}
    (mark,) = test_shard_calls.test_any_other_value_in_any_place_of_a_request_is_refused_or_makes_sense.pytestmark
    assert set(mark.args[1]) == calls


@pytest.mark.parametrize("method", sorted(WHO))
def test_no_method_answers_without_the_token(method: str, one_server: tuple[Service, Any]):
    service, client = one_server
    instance = client._membership.caller.instance
    before = service.journal()
    for token in (None, "", TOKEN[:-1], TOKEN + "x", TOKEN.upper()):
        for secret in (None, SECRET):
            with calling(service.address, {"token": token, "secret": secret}) as caller:
                code, said = caller.send(method, request_of(method, instance))
            assert code is Code.UNAUTHENTICATED and TOKEN not in said and SECRET not in said
    assert service.journal() == before


@pytest.fixture(scope="module")
def one_server(zygote: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Any]]:
    """Yield a server behind a token, and its only peer."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "token").write_text(TOKEN)
    service = Service(zygote, folder, {"demo": {"peers": 2, "quorum": 1}}, extra={"token_file": str(folder / "token")})
    service.start()
    with service.client("p0", START, connection={"token_file": str(folder / "token")}) as client:
        client.start(START)
        yield service, client
    service.stop()


@pytest.mark.parametrize("method", OF_PEERS)
def test_a_peer_is_spoken_for_by_its_own_process_alone(method: str, one_server: tuple[Service, Any]):
    service, client = one_server
    spool = service.state / "runs" / "demo" / "spool"
    before = service.journal()
    with calling(service.address, {"token": TOKEN}) as caller:
        for instance in ("", "another", client._membership.caller.instance[:-1]):
            code, said = caller.send(method, request_of(method, instance))
            assert code is Code.FAILED_PRECONDITION and "another process has registered as peer 'p0' since" in said
            assert client._membership.caller.instance not in said
        # Who never was a member has nothing to leave.
        code, said = caller.send(method, request_of(method, client._membership.caller.instance, peer="p1"))
        assert (code, "is not a member of the run" in said) in [(Code.FAILED_PRECONDITION, True), (Code.OK, False)]
        assert (code is Code.OK) == (method == "Leave")
    assert service.journal() == before and not list(spool.rglob("*.frames"))


def test_with_mutual_tls_peers_do_what_peers_do_and_operators_alone_the_rest(make_service: MakeService, tmp_path: Path):
    (tmp_path / "token").write_text(TOKEN)
    authority = Authority(tmp_path, "ours")
    own, peers_own, chief = (authority.issue(name) for name in ("127.0.0.1", "site-a", "chief"))
    service = make_service(peers=2, quorum=1)
    service.extra = {
        **own,
        "tls_client_ca": authority.file,
        "operators": ["chief"],
        "token_file": str(tmp_path / "token"),
    }
    server = service.start()
    connection = {"tls_ca": authority.file, **peers_own, "token_file": str(tmp_path / "token")}
    with service.client("p0", START, connection=connection) as client:
        client.start(START)
        instance = client._membership.caller.instance
        with shown(service.address, authority, peers_own, TOKEN) as caller:
            for method, who in WHO.items():
                code, said = caller.send(method, request_of(method, instance))
                if who == "an operator":
                    assert code is Code.PERMISSION_DENIED and "under operators" in said
                elif who == "the first server":
                    assert code is Code.FAILED_PRECONDITION and "it was started as a first server" in said
                else:
                    assert code is not Code.PERMISSION_DENIED and code is not Code.UNAUTHENTICATED, method
        # The token alone, or the certificate alone, is not enough.
        with shown(service.address, authority, chief) as caller:
            assert caller.send("Drain", request_of("Drain", ""))[0] is Code.UNAUTHENTICATED
        with shown(service.address, authority, {}, TOKEN) as caller:
            assert caller.send("Drain", request_of("Drain", ""), seconds=5.0)[0] is Code.UNAVAILABLE
    assert server.exit_code is None
    with shown(service.address, authority, chief, TOKEN) as caller:
        assert caller.send("Drain", request_of("Drain", ""))[0] is Code.OK
    assert server.wait() == 0


def test_a_server_that_is_not_the_first_one_moves_values_and_obeys_the_first_one_alone(
    make_service: MakeService, tmp_path: Path
):
    files = {}
    for name, content in (("token_file", TOKEN), ("shard_secret_file", SECRET)):
        (tmp_path / name).write_text(content)
        files[name] = str(tmp_path / name)
    cluster = Cluster(make_service({"demo": {"peers": 2, "quorum": 1}}), 2, **files)
    cluster.start_all()
    with cluster.service.client("p0", START, connection={"token_file": files["token_file"]}) as client:
        values = client.start(START)
        with calling(cluster.addresses[1], {"token": TOKEN}) as caller:
            for method in WHO:
                for instance in ("another", client._membership.caller.instance):
                    code, said = caller.send(method, request_of(method, instance), seconds=60.0)
                    if method == "Shard":
                        assert code is Code.PERMISSION_DENIED and "shows the secret of shard_secret_file" in said
                    elif method not in AT_EVERY_SERVER:
                        assert code is Code.FAILED_PRECONDITION and "ask the first server" in said
                    elif instance == "another":
                        assert code is Code.FAILED_PRECONDITION, (method, code, said)
        assert digest(values) == digest(START)
