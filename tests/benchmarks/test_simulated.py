# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/simulated`: what it compares, and, as root with iproute2, one setting on a limited link."""

import os
import shutil
from collections import Counter

import pytest
import torch.distributed as dist

from benchmarks import emulated_worker
from benchmarks.simulated import __main__ as benchmark
from benchmarks.simulated.settings import SETTINGS, Setting
from benchmarks.simulated.simulation import Link, simulated
from tests.benchmarks.reports import read_cases
from tests.support.distributed import run_ranks

LINK = Link(bytes_per_second=1e6, exchange=0.5e6, latency=0.0)


def told(setting: Setting, seconds: float = 1.0) -> list[dict]:
    """Return what two workers say whose steps all take a second."""
    return [{"steps": [1.0] * setting.intervals * setting.interval, "seconds": seconds} for _ in range(2)]


def test_intervals_in_the_middle_of_a_run_are_simulated_with_the_runs_own_figures():
    synchronous = Setting(name="s", kind="synchronous", intervals=3)
    # 100,000 values of 2 bytes, of which a ring among two sends as many, at the rate of an exchange: 0.4 s.
    assert simulated(synchronous, LINK, told(synchronous), 100_000, None) == pytest.approx(1 / 1.4)
    diloco = Setting(name="d", kind="local_sgd", interval=4, intervals=2)
    assert simulated(diloco, LINK, told(diloco), 100_000, None) == pytest.approx(4 / 4.8)
    # What is not part of the measured intervals, the mean at the end of a run with a delay, does not count.
    delayed = Setting(name="d", kind="local_sgd", interval=4, intervals=2, delay=2)
    assert simulated(delayed, LINK, told(delayed), 100_000, None) == pytest.approx(1.0)
    # Two peers share a stream's rate: 0.8 s up, 0.8 s down; 0.8 MB reduced at 8 MB/s.
    service = Setting(name="p", kind="service", interval=4, intervals=2, codec="fp32")
    assert simulated(service, LINK, told(service), 100_000, 8.0) == pytest.approx(4 / (4 + 1.6 + 0.1))


def probed(measure):
    """Return, by receiver, the bytes that a worker sends in a probe, and those that the probe counts."""
    dist.init_process_group("gloo")
    sent, send = Counter(), dist.batch_isend_irecv

    def told(operations):
        for operation in operations:
            if operation.op is dist.isend:
                sent[operation.group_peer if operation.peer is None else operation.peer] += operation.tensor.nbytes
        return send(operations)

    dist.batch_isend_irecv = told
    seconds, nbytes = getattr(emulated_worker, measure)(1200, 4, dist.get_rank(), 3)
    assert seconds > 0
    return sent, nbytes


def test_probes_send_what_they_stand_for():
    for rank, (sent, nbytes) in enumerate(run_ranks(probed, 3, "_exchange")):
        # Two thirds of 1200 values, to both others, there and back, four times.
        assert nbytes == 3200
        assert sent == {other: 4 * 3200 for other in range(3) if other != rank}
    for rank, (sent, nbytes) in enumerate(run_ranks(probed, 3, "_ring")):
        assert nbytes == 6400
        assert sent == {(rank + 1) % 3: 4 * 6400}


def test_the_settings_are_those_that_the_documentation_shows():
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS) >= 8
    assert {setting.kind for setting in SETTINGS} == {"synchronous", "local_sgd", "service"}


def test_a_way_to_the_service_is_refused_for_settings_without_one(capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--latency-ms", "50", "--settings", "synchronous"])
    assert ended.value.code == 2
    assert "--latency-ms is of a peer's way to the service; give --settings of" in capsys.readouterr().err


def test_without_the_programs_there_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    monkeypatch.setenv("PATH", "/nowhere")
    assert benchmark.main([]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "there is no ip on the PATH; install iproute2" in error


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="network namespaces need root and iproute2")
def test_a_setting_is_measured_on_a_limited_link(tmp_path):
    path = tmp_path / "report.json"
    words = ["--mbits", "100", "--settings", "DiLoCo, H 20", "--shrink", "10", "--step-ms", "10", "--repeats", "1"]
    assert benchmark.main([*words, "--workers", "2", "--nice", "0", "--json", str(path)]) == 0
    (case,) = read_cases(path).values()
    assert case["goal"] == benchmark.GOAL
