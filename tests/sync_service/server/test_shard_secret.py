# SPDX-License-Identifier: Apache-2.0
"""Peers cannot lead a server, whoever of them tries, and no name that anybody sends leads out of a server's folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.sync_service.protocol import wire
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.frames import Frame, whole_box
from megatron_ext.sync_service.protocol.protocol import grpc, pb2
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.server.config import ServerConfig
from tests.support.waiting import until
from tests.sync_service.cluster import Cluster
from tests.sync_service.service import Service
from tests.sync_service.shard_caller import ShardCaller, calling, word
from tests.sync_service.shards.test_sharding import refusal
from tests.sync_service.toy_peer import digest, start_values

MakeService = Callable[..., Service]
CATALOG = Catalog([TensorSpec(name="norm", shape=(8,))])
TOKEN, SECRET, OTHER = "token-of-the-peers", "secret-of-the-servers", "secret-of-some-others"
START = start_values(1)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Files with the token and two secrets."""
    found = {}
    for name, content in (("token", TOKEN), ("secret", SECRET), ("other", OTHER)):
        (tmp_path / name).write_text(content + "\n")
        found[name] = str(tmp_path / name)
    return found


def cluster_of(make_service: MakeService, files: dict[str, str]) -> Cluster:
    """Return two servers behind a token that know each other."""
    return Cluster(make_service(), 2, token_file=files["token"], shard_secret_file=files["secret"])


def upload(caller: ShardCaller, peer: str) -> tuple[Any, str]:
    """Upload everything in the name of a peer, to the start of the run."""
    frames = [Frame.make(spec.name, spec.shape, whole_box(spec.shape), 0, torch.ones(spec.numel)) for spec in CATALOG]
    message = wire.Upload(caller=pb2.Caller(run="demo", peer=peer, instance="i"), round=0, frames=frames)
    return caller.send("Upload", wire.pack(message))


def everything(service: Service) -> set[str]:
    """Return what there is in and around the servers' folders, except for logs and configurations."""
    found = {str(path.relative_to(service.folder)) for path in service.folder.rglob("*")}
    return {path for path in found if not path.startswith("server.")}


LEADS_OUT = "../../../../../../pwned"


@pytest.mark.parametrize("shown", [{}, {"token": TOKEN, "secret": SECRET}])
def test_a_member_s_name_that_leads_out_of_the_folder_makes_no_file(
    make_service: MakeService, files: dict[str, str], shown: dict[str, str]
):
    cluster = cluster_of(make_service, files) if shown else Cluster(make_service(), 2)
    service = cluster.service
    server = cluster.start(1)
    before = everything(service)
    with calling(cluster.addresses[1], shown) as caller:
        out, inside = (
            word(cluster.addresses, RunConfig(peers=2), CATALOG, members={name: "i"}) for name in (LEADS_OUT, "p")
        )
        code, said = caller.ask("follow", out)
        uploaded, _ = upload(caller, LEADS_OUT)
        assert everything(service) == before
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "a key of follow.members is '../../" in said
        assert uploaded is not grpc.StatusCode.OK
        # What makes sense is done.
        assert caller.ask("follow", inside)[0] is grpc.StatusCode.OK
        assert upload(caller, "p")[0] is grpc.StatusCode.OK
    assert "Traceback" not in server.output


def test_the_peers_token_is_not_enough_to_lead_a_server(make_service: MakeService, files: dict[str, str]):
    cluster = cluster_of(make_service, files)
    server = cluster.start(1)
    before = everything(cluster.service)
    told = word(cluster.addresses, RunConfig(peers=2), CATALOG, members={"p": "i"})
    for shown, wanted in (
        ({"token": TOKEN}, "a server shows the secret of shard_secret_file here, and this caller shows none"),
        ({"token": TOKEN, "secret": TOKEN}, "shows another secret than this one has; give all servers"),
        ({"token": TOKEN, "secret": ""}, "shows another secret than this one has; give all servers"),
        ({"secret": SECRET}, "the token is missing or wrong"),
    ):
        with calling(cluster.addresses[1], shown) as caller:
            for call, content in (("follow", told), ("write", {}), ("seal", {}), ("seal", None)):
                code, said = caller.ask(call, content)
                assert code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED) and wanted in said
                assert SECRET not in said
    assert everything(cluster.service) == before and SECRET not in server.output


def test_servers_that_show_each_other_the_secret_serve_peers_that_have_the_token(
    make_service: MakeService, files: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    cluster = cluster_of(make_service, files)
    cluster.start_all()
    with cluster.service.client("p0", START, connection={"token_file": files["token"]}) as client:
        assert digest(client.start(START)) == digest(START)
    flags = ["--server", cluster.addresses[0], "--token-file", files["token"]]
    assert main(["server", "status", *flags]) == 0
    assert "PROBLEM" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("first", "other", "wanted"),
    [
        ("other", "secret", "the first server shows another secret than this one has"),
        (None, "secret", "a server shows the secret of shard_secret_file here, and this caller shows none"),
        ("secret", None, "the first server shows a secret, and this one was started without shard_secret_file"),
    ],
)
def test_servers_with_different_secrets_name_the_field_of_both_and_tell_neither(
    make_service: MakeService,
    files: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    first: str | None,
    other: str | None,
    wanted: str,
):
    service = make_service()
    cluster = Cluster(service, 2)
    secrets = [{} if name is None else {"shard_secret_file": files[name]} for name in (first, other)]
    followed = cluster.start(1, **secrets[1])
    service.server = cluster.start(0, **secrets[0])
    until(lambda: wanted in service.output, "the first server's words")
    lines = [line for line in service.output.splitlines() if wanted in line]
    assert len(lines) == 1 and f"shard 1 at {cluster.addresses[1]}: " in lines[0]
    assert "give all servers of shards the same shard_secret_file" in lines[0]
    told = refusal(service)
    assert wanted in told
    assert main(["server", "status", "--json", "--server", service.address]) == 0
    said = service.output + followed.output + told + capsys.readouterr().out
    assert SECRET not in said and OTHER not in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"token_file": "t"}, "shards with token_file or tls_client_ca need shard_secret_file"),
        (
            {"tls_cert": "c", "tls_key": "k", "tls_ca": "a", "tls_client_ca": "a"},
            "shards with token_file or tls_client_ca need shard_secret_file",
        ),
        ({"shards": (), "shard_secret_file": "s"}, "shard_secret_file is for the calls of shards, and there are none"),
        ({"token_file": "t", "shard_secret_file": "s"}, None),
        ({}, None),
    ],
)
def test_where_peers_have_to_show_something_servers_need_a_secret(changes: dict[str, Any], problem: str | None):
    given = {"dir": "x", "shards": ("a:1", "b:1"), "runs": {"r": RunConfig(peers=2)}, **changes}
    config = ServerConfig(**given)
    if problem is None:
        config.check()
        return
    with pytest.raises(UserError) as refused:
        config.check()
    assert problem in str(refused.value)


@pytest.mark.parametrize("flag", [True, False])
def test_a_secret_that_cannot_be_used_is_named(
    tmp_path: Path, files: dict[str, str], capsys: pytest.CaptureFixture[str], flag: bool
):
    (tmp_path / "short").write_text("short")
    for secret, problem in (
        ("short", "must hold at least 16 printable ASCII characters"),
        ("none", "cannot be read: No such file"),
        ("token", "holds the token, which every peer has; make another one"),
    ):
        config = tmp_path / "server.yaml"
        in_file = "" if flag else f"shard_secret_file: {secret}\n"
        config.write_text(
            f"shards: [127.0.0.1:1, 127.0.0.1:2]\ntoken_file: token\n{in_file}runs: {{r: {{peers: 2}}}}\n"
        )
        flags = ["--shard-secret-file", str(tmp_path / secret)] if flag else []
        argv = ["server", "start", "--config", str(config), "--dir", str(tmp_path / "state"), "--shard", "1", *flags]
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert f"shard_secret_file {tmp_path / secret}: {problem}" in error and TOKEN not in error
