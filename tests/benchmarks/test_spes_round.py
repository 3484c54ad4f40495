# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/spes_round.py` at toy size: it runs, and reports what it promises."""

import os
import signal
import subprocess
import sys

import pytest

from benchmarks import spes_peers, spes_round
from benchmarks.byte_relay import ByteRelay
from tests.benchmarks.reports import read_cases
from tests.support.distributed import REPOSITORY
from tests.support.processes import marked_processes
from tests.support.waiting import until

GOALS = {
    "peak_over_model_p2": 3.0,
    "round_seconds_p2": None,
    "grpc_throughput_fraction": 0.6,
    "sockets_over_grpc": None,
    "fraction_possible_beside_grpc": None,
    "bytes_fp32": None,
    "bytes_bf16": 0.36,
    "bytes_int8": 0.18,
    "bytes_4bit": 0.095,
    "slow_link_over_its_bytes": None,
    "merge_memory_fraction": 0.1,
}


@pytest.mark.slow
def test_every_part_is_reported_against_its_goals(tmp_path, capsys):
    path = tmp_path / "report.json"
    tiny = ["--peers", "2", "--millions", "0.2", "--bytes-millions", "0.5", "--layers", "2", "--hidden", "32"]
    tiny += ["--rounds", "1", "--merge-width", "64", "--dir", str(tmp_path)]
    assert spes_round.main([*tiny, "--json", str(path)]) == 0
    cases = read_cases(path)
    assert {name: case["goal"] for name, case in cases.items()} == GOALS
    for name, case in cases.items():
        assert case["value"] > 0 or name == "merge_memory_fraction"
        assert case["direction"] == ("higher" if "fraction" in name and name != "merge_memory_fraction" else "lower")
    # Two peers that own half of the experts each: 70 % up, 70 % down, and little for the framing.
    assert 0.7 < cases["bytes_fp32"]["value"] < 0.75
    assert cases["bytes_4bit"]["value"] < cases["bytes_int8"]["value"] < cases["bytes_bf16"]["value"]
    assert not list(tmp_path.glob("spes_round.*"))


@pytest.mark.slow
def test_a_benchmark_that_is_ended_leaves_no_server_and_no_files(tmp_path):
    endless = ["--parts", "rounds", "--peers", "2", "--millions", "0.2", "--layers", "2", "--hidden", "32"]
    endless += ["--rounds", "1000000", "--dir", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.spes_round", *endless]
    benchmark = subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        # Only the newest snapshots are kept, so that any that comes later than two rounds says so, too.
        snapshots = "spes_round.*/p2/state/**/round-*.safetensors"
        until(lambda: any(path.stem >= "round-00000002" for path in tmp_path.glob(snapshots)), "two rounds")
        assert len(marked_processes("TMPDIR", str(tmp_path))) >= 5  # this one, two servers, two peers
        benchmark.terminate()
        assert benchmark.wait(60) == 128 + signal.SIGTERM
    finally:
        benchmark.kill()
    until(lambda: marked_processes("TMPDIR", str(tmp_path)) == [], "the last process, which forked the peers")
    assert not list(tmp_path.glob("spes_round.*"))


def test_the_default_is_a_model_of_the_size_that_it_says():
    options = spes_round.parser().parse_args([])
    shapes = spes_peers.model(1e6 * options.millions, options.layers, options.hidden, options.experts)
    assert abs(spes_round.numel(shapes) / 126e6 - 1) < 0.01 and abs(spes_round.shared(shapes) - 0.4) < 0.01
    assert options.peers == [2, 4, 8]


def test_the_relay_counts_what_passes_through_it():
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as listener, ByteRelay(listener.getsockname()[1]) as relay:

        def answer() -> None:
            caller, _ = listener.accept()
            received = b""
            while len(received) < 1000:
                received += caller.recv(1000)
            caller.sendall(bytes(30))
            caller.close()

        helper = threading.Thread(target=answer)
        helper.start()
        host, port = relay.address.split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(bytes(1000))
            received = b""
            while data := connection.recv(100):
                received += data
        helper.join()
        assert (relay.up, relay.down, len(received)) == (1000, 30, 30)
