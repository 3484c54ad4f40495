# SPDX-License-Identifier: Apache-2.0
"""How much memory a process may take, by folders like those of the kernel."""

import pytest

from megatron_ext.local_sgd.exchange.free_memory import free_memory

GIB = 2**30
NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "4:memory:"),
    2: ("memory.max", "memory.current", "inactive_file", "0::"),
}


def group(folder, version, limit, used, given_back):
    folder.mkdir(parents=True, exist_ok=True)
    files = NAMES[version]
    (folder / files[0]).write_text(f"{limit}\n")
    (folder / files[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{files[2]} {given_back}\n")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 64 * GIB}))


@pytest.mark.parametrize("version", NAMES)
@pytest.mark.parametrize("path", ["/job/step", "/seen/only/outside"])
def test_the_narrowest_group_decides(tmp_path, version, path):
    top = tmp_path / ("memory" if version == 1 else "")
    group(top, version, 50 * GIB, 8 * GIB, 0)
    group(top / "job", version, 20 * GIB, 12 * GIB, 4 * GIB)
    group(top / "job" / "step", version, "max" if version == 2 else 2**63 - 4096, GIB, 0)
    process = tmp_path / "process"
    process.write_text(f"3:cpuset:/\n{NAMES[version][3]}{path}\n")
    assert free_memory(tmp_path, process) == (12 if path == "/job/step" else 42) * GIB


def test_without_groups_it_is_what_the_machine_has(tmp_path):
    assert free_memory(tmp_path, tmp_path / "none") == 64 * GIB
    (tmp_path / "process").write_text("0::/\n")
    assert free_memory(tmp_path, tmp_path / "process") == 64 * GIB
