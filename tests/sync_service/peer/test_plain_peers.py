# SPDX-License-Identifier: Apache-2.0
"""Peers without Megatron: the example's loop, and a hundred peers in one process."""

import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from megatron_ext.sync_service.peer.client import Values
from tests.support.distributed import REPOSITORY
from tests.sync_service.service import Service

MakeService = Callable[..., Service]
EXAMPLE = REPOSITORY / "examples" / "sync_service" / "plain_peer.py"


def example(service: Service, peer: str, *options: str) -> "subprocess.Popen[str]":
    """Start the example as a peer of run demo."""
    command = [sys.executable, str(EXAMPLE), "--server", service.address, "--run", "demo", "--peer", peer, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_plain_loop_learns_as_a_peer_and_ends_with_the_weights_of_the_others(make_service: MakeService):
    service = make_service(peers=2, outer_optimizer="sgd", outer_optimizer_lr=0.7, outer_optimizer_momentum=0.6)
    service.start()
    said = [peer.communicate(timeout=120) for peer in [example(service, name) for name in ("p0", "p1")]]
    rounds = [re.findall(r"^round (\d+): loss ([\d.]+), weights (\w{12})$", out, re.MULTILINE) for out, _ in said]
    assert [[int(number) for number, _, _ in found] for found in rounds] == [list(range(1, 11))] * 2, said
    assert [digest for _, _, digest in rounds[0]] == [digest for _, _, digest in rounds[1]]
    for found in rounds:
        assert float(found[-1][1]) < 0.5 * float(found[0][1])


def test_a_peer_of_another_interval_is_told_so_in_one_sentence(make_service: MakeService):
    service = make_service(peers=2)
    service.start()
    with service.client("p0", {"w": torch.ones(2)}, agreed={"interval": "50"}) as client:
        client.register()
        process = example(service, "p1", "--interval", "20")
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2 and "Traceback" not in err
    (said,) = [line for line in err.splitlines() if line.startswith("megatron-ext: error: ")]
    assert "config field 'interval' is '20' at peer 'p1' and '50' in the run" in said


def test_a_hundred_peers_in_one_process_meet(make_service: MakeService):
    count = 100
    service = make_service(peers=count)
    service.start()
    start = {"w": torch.zeros(8, 5)}

    def train(name: str) -> Values:
        with service.client(name, start, streams=1) as client:
            values = client.start(start)
            while client.round < 2:
                values = client.sync({"w": values["w"] + client.index}).values
            client.leave()
            return values

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(train, [f"p{number}" for number in range(count)]))
    assert all(torch.equal(values["w"], found[0]["w"]) for values in found)
    torch.testing.assert_close(found[0]["w"], torch.full((8, 5), 2 * (count - 1) / 2))
