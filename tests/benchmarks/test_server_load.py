# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/server_load.py` at toy size: it runs, and reports what it promises."""

import math

import pytest

from benchmarks import server_load
from benchmarks.server_load import Measured
from tests.benchmarks.reports import read_cases


@pytest.mark.slow
def test_every_number_of_servers_is_reported(tmp_path, capsys):
    path = tmp_path / "report.json"
    tiny = ["--peers", "2", "--processes", "1", "--values", "64", "--rounds", "1", "--warmup", "1"]
    assert server_load.main([*tiny, "--servers", "1", "2", "--json", str(path)]) == 0
    cases = read_cases(path)
    kinds = ("round_seconds", "processor_seconds", "peak_mib", "threads")
    assert set(cases) == {f"load_{kind}_{size}" for kind in kinds for size in ("s1_p2", "s2_p2")}
    assert all(case["direction"] == "lower" and case["goal"] is None for case in cases.values())
    assert all(case["value"] > 0 for name, case in cases.items() if "processor" not in name)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith(("1, ", "2, "))] == [["1,", "2"], ["2,", "2"]]


def test_the_growth_of_a_round_is_the_power_of_the_number_of_peers():
    def measured(seconds: float) -> Measured:
        return Measured(seconds=seconds, processor=1.0, peers_processor=1.0, peak=1 << 20, threads=7)

    found = {(1, 8): measured(1.0), (1, 64): measured(8.0), (2, 64): measured(4.0), (1, 128): measured(32.0)}
    growth = {key: server_load._row(found, *key)[-1] for key in found}
    assert growth == {(1, 8): "-", (1, 64): "1.00", (2, 64): "-", (1, 128): f"{math.log(4) / math.log(2):.2f}"}


def test_a_peer_that_fails_ends_the_measurement_with_its_reason(tmp_path):
    from benchmarks.synthetic_peers import SyntheticPeers

    options = server_load.parser().parse_args(["--values", "8"])
    with pytest.raises(RuntimeError, match="a peer has failed: UserError"):
        SyntheticPeers("nowhere", 1, options)
