# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/messages.py` at its smallest: both ways carry the same frames, and it reports what it promises."""

from benchmarks import messages
from tests.benchmarks.reports import read_cases


def test_both_ways_are_measured_and_compared(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert messages.main(["--messages", "2", "--turns", "1", "--json", str(path)]) == 0
    cases = read_cases(path)
    assert list(cases) == ["messages_wire", "messages_protobuf", "messages_speedup"]
    wire, protobuf, speedup = (cases[name]["value"] for name in cases)
    assert protobuf > 0 and speedup == wire / protobuf
    assert "wire.py" in capsys.readouterr().out
