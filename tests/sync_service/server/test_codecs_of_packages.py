# SPDX-License-Identifier: Apache-2.0
"""A codec of another package: rounds are made with it, and a server that lacks it, or has another, says so at once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_ext.errors import UserError
from tests.support.packages import write_package
from tests.support.waiting import until
from tests.sync_service.cluster import Cluster, started
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import start_values, trained

MakeService = Callable[..., Service]
START = start_values(1)
CODEC = """
from megatron_ext.outer.codecs.cast import Bf16Codec
from megatron_ext.outer.places import Where

class Own(Bf16Codec):
    name = "their-cast"
"""
SYNCHRONOUS = CODEC + '    refused_in = {Where.ASYNCHRONOUS: "it has been made for rounds of many"}\n'
KNOWN = "use one of fp32, bf16, fp16, fp8, int8, int4, topk, topk2"


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of a package with a codec, which this process has, too."""
    folder = tmp_path / "packages"
    folder.mkdir()
    write_package(folder, "codecs", "their_cast", SYNCHRONOUS, "their_cast:Own", "their-cast")
    monkeypatch.syspath_prepend(str(folder))
    return str(folder)


def refused(service: Service, codec: str = "their-cast") -> str:
    """Return what a peer with a codec is told when it registers."""
    with service.client("p0", START, codec=codec) as client, pytest.raises(UserError) as caught:
        client.register()
    return str(caught.value)


def test_rounds_are_made_with_it_to_the_bits_of_the_one_that_it_is(make_service: MakeService, theirs: str):
    runs = {name: {"peers": 2, "outer_optimizer": "sgd"} for name in ("bf16", "their-cast")}
    service = make_service(runs)
    service.packages = theirs
    service.start()

    def peer(codec: str, index: int) -> list[torch.Tensor]:
        with service.client(f"p{index}", START, index=index, codec=codec, run=codec) as client:
            values = START
            client.start(values)
            for number in range(1, 4):
                values = client.sync(trained(values, index, number)).values
            return [values[name].clone() for name in sorted(values)]

    with ThreadPoolExecutor(4) as pool:
        made = {codec: list(pool.map(lambda index, codec=codec: peer(codec, index), range(2))) for codec in runs}
    for found in made["their-cast"]:
        assert all(map(torch.equal, found, made["bf16"][0]))
    assert not all(map(torch.equal, made["bf16"][0], [START[name] for name in sorted(START)]))


def test_a_server_that_lacks_it_says_so_to_the_peer_that_registers(make_service: MakeService, theirs: str):
    service = make_service()
    service.start()
    said = f"at the server, codec 'their-cast' is not known; {KNOWN}, or install there what the peer has"
    assert said in refused(service)
    assert service.events("created") == []


def test_a_server_with_another_version_says_so(make_service: MakeService, theirs: str, tmp_path: Path):
    service = make_service()
    newer = tmp_path / "newer"
    newer.mkdir()
    write_package(newer, "codecs", "their_cast", CODEC, "their_cast:Own", "their-cast", "2.0")
    service.packages = str(newer)
    service.start()
    said = "codec 'their-cast' comes from their_cast 1.0 at the peer and from their_cast 2.0 at the server; install"
    assert said in refused(service)


def test_one_that_a_server_cannot_import_is_refused_with_the_package(
    make_service: MakeService, theirs: str, tmp_path: Path
):
    service = make_service()
    bad = tmp_path / "bad"
    bad.mkdir()
    write_package(bad, "codecs", "their_cast", "import nowhere_at_all", "their_cast:Own", "their-cast")
    service.packages = str(bad)
    service.start()
    said = refused(service)
    assert "at the server, the codec 'their-cast' (their_cast:Own) of package 'their_cast' cannot be loaded: " in said
    assert "No module named 'nowhere_at_all'" in said


def test_rounds_in_which_it_does_not_work_refuse_it_with_its_own_reason(make_service: MakeService, theirs: str):
    service = make_service(rounds="asynchronous")
    service.packages = theirs
    service.start()
    said = "codec their-cast does not work in asynchronous rounds at a server: it has been made for rounds of many; "
    assert said + "use fp32 or bf16" in refused(service)


def test_a_shard_that_lacks_it_is_named_before_the_run_begins(make_service: MakeService, theirs: str):
    cluster = Cluster(make_service(), 2)
    started(cluster.launch(1))
    started(cluster.launch(0, packages=theirs))
    said = "has no codec 'their-cast', the first server from their_cast 1.0; install the same on all servers"
    assert f"shard 1 at {cluster.addresses[1]} {said}" in refused(cluster.service)
    assert cluster.service.events("created") == []


def test_a_server_that_is_started_again_without_it_ends_with_its_name(make_service: MakeService, theirs: str):
    service = make_service()
    service.packages = theirs
    service.start()
    with service.client("p0", START, codec="their-cast") as client:
        client.register()
    assert service.server is not None
    service.server.kill()
    service.server.wait()
    service.packages = ""
    service.start()
    until(lambda: service.server.exit_code is not None, "the end of a server that lacks a codec")
    assert service.server.exit_code not in (0, None)
    said = f"run demo: its peers' codec 'their-cast' is not known; {KNOWN}, or install the package that has it"
    assert said in service.output and "Traceback" not in service.output
