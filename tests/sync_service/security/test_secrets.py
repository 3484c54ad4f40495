# SPDX-License-Identifier: Apache-2.0
"""Tokens, the servers' secret and private keys are in no byte that servers, peers and people's commands write."""

import base64
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from megatron_ext.cli.main import main
from tests.sync_service.authority import Authority
from tests.sync_service.cluster import Cluster
from tests.sync_service.service import Process, Service
from tests.sync_service.shard_caller import shard_request, shown
from tests.sync_service.toy_peer import start_values

MakeService = Callable[..., Service]
ROUNDS = 2
LOUD = "tests.sync_service.security.loud"
START = start_values(1)


class Loud(Cluster):
    """Servers that log everything."""

    def launch(self, number: int, *failpoints: str, packages: str = "", **changes: Any) -> Process:
        """Begin to start one."""
        fork = self.service.zygote.fork

        def loudly(job: dict[str, Any]) -> int:
            return fork({**job, "call": f"{LOUD}:serve", "arguments": job["argv"]})

        self.service.zygote.fork = loudly
        try:
            return super().launch(number, *failpoints, packages=packages, **changes)
        finally:
            self.service.zygote.fork = fork


def peer(service: Service, name: str, **connection: Any) -> Process:
    """Start a peer that logs everything."""
    job = {"name": name, "rounds": ROUNDS, "connection": {"server": service.address, **connection}}
    job = {"call": f"{LOUD}:train", "arguments": job}
    process = Process(service.zygote, service.folder / f"{name}.{len(service.processes)}.log", job)
    service.processes.append(process)
    return process


def forms(secret: str) -> set[bytes]:
    """Return how a secret may be written."""
    data = secret.encode()
    return {data, base64.b64encode(data).rstrip(b"="), data.hex().encode(), data[::-1], secret.encode("utf-16-le")}


@pytest.fixture
def given(tmp_path: Path) -> dict[str, str]:
    """Files with secrets."""
    (tmp_path / "given").mkdir()
    contents = {
        "token": "token-of-the-peers-Zk3q",
        "secret": "secret-of-the-servers-Yw8n",
        "wrong": "token-of-somebody-else-Xv2m",
    }
    for name, content in contents.items():
        (tmp_path / "given" / name).write_text(content + "\n")
    return {name: str(tmp_path / "given" / name) for name in contents}


def test_no_secret_is_in_anything_that_a_run_writes(
    make_service: MakeService, tmp_path: Path, given: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    authority = Authority(tmp_path / "given", "ours")
    own, theirs = authority.issue("127.0.0.1"), authority.issue("site-a")
    service = make_service(peers=2, quorum=1, grace_seconds=0.1)
    servers = Loud(
        service,
        2,
        **own,
        tls_ca=authority.file,
        tls_client_ca=authority.file,
        token_file=given["token"],
        shard_secret_file=given["secret"],
        status_port=0,
    )
    servers.start_all()
    service.server = servers.servers[0]
    page = re.search(r"status page at (\S+)", service.output)
    assert page is not None, service.output
    connection = {"tls_ca": authority.file, **theirs, "token_file": given["token"]}
    lost = peer(service, "lost", **{**connection, "token_file": given["wrong"]})
    peers = [peer(service, f"p{index}", **connection) for index in range(2)]
    assert [process.wait() for process in peers] == [0, 0], [process.output for process in peers]
    assert lost.wait() == 2 and "the token is missing or wrong" in lost.output
    # What is refused, what cannot be read, and what fails at a shard.
    token, secret, wrong = (Path(given[name]).read_text().strip() for name in ("token", "secret", "wrong"))
    seal = shard_request("seal", {"peer": "p0", "instance": "i", "index": 1, "round": 9}).SerializeToString()
    for address in servers.addresses:
        with shown(address, authority, theirs, token, secret) as caller:
            for method, message in (("Register", b"\xff" * 20), ("Shard", seal)):
                print(*caller.send(method, message))
        with shown(address, authority, theirs, wrong, wrong) as caller:
            print(*caller.send("Status", b""))
    read = {name: urlopen(page[1] + name, timeout=20).read() for name in ("", "status.json", "metrics")}
    flags = ["--server", service.address, "--token-file", given["token"], "--tls-ca", authority.file]
    flags += ["--tls-cert", theirs["tls_cert"], "--tls-key", theirs["tls_key"]]
    for argv in (["status"], ["status", "--json"], ["evict", "p0"], ["drain"]):
        main(["server", *argv, *flags])
    for command in ("start", "status", "evict"):
        with pytest.raises(SystemExit):
            main(["server", command, "--help"])
    for server in servers.servers.values():
        server.kill(15)
        assert server.wait() == 0, server.output
    said = capsys.readouterr()
    written = {str(path): path.read_bytes() for path in service.folder.rglob("*") if path.is_file()}
    assert any("journal.jsonl" in name for name in written) and any(".safetensors" in name for name in written)
    written |= read | {"out": said.out.encode(), "err": said.err.encode()}
    # They did speak up; peers log nothing at that level, and have printed their connection.
    assert all("DEBUG" in server.output for server in servers.servers.values())
    assert all(given["token"] in process.output for process in peers)
    keys = [line for files in (own, theirs) for line in Path(files["tls_key"]).read_text().splitlines()[1:-1]]
    for hidden in (token, secret, wrong, *keys):
        for form in forms(hidden):
            assert [name for name, content in written.items() if form in content] == []
    # Who sees page, status or another peer's output learns neither where secrets are nor how to speak for a peer.
    instances = [event["instance"] for event in service.events("joined")]
    assert len(instances) == 2
    seen = {**read, "out": said.out.encode(), "p0": peers[0].output.encode()}
    for name, content in seen.items():
        others = instances if name != "p0" else [e["instance"] for e in service.events("joined") if e["peer"] != "p0"]
        assert not [instance for instance in others if instance.encode() in content], name
    for content in read.values():
        assert b"/given/" not in content and str(service.folder).encode() not in content


def test_a_secret_that_cannot_be_used_is_not_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for number, content in enumerate(["hunter2", "pa\tss-word-of-16-letters", "caf\u00e9-" * 4]):
        path = tmp_path / f"secret{number}"
        path.write_text(content, encoding="utf-8")
        start = ["--dir", str(tmp_path / "state"), "--peers", "1"]
        for argv in (["start", *start, "--token-file", str(path)], ["status", "--token-file", str(path)]):
            assert main(["server", *argv]) == 2
            error = capsys.readouterr().err
            assert f"token_file {path}: must hold at least 16 printable" in error
            assert content not in error and content[:4] not in error
