# SPDX-License-Identifier: Apache-2.0
"""The committed code of the protocol is what the script makes of sync.proto."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = REPOSITORY / "scripts" / "make_sync_protocol.sh"
CODE = Path("megatron_ext", "sync_service", "protocol", "sync_pb2.py")


def wanted_release() -> str:
    found = re.search(r"^wanted=(\S+)$", SCRIPT.read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def installed_release() -> str | None:
    try:
        return metadata.version("grpcio-tools")
    except metadata.PackageNotFoundError:
        return None


@pytest.mark.skipif(
    installed_release() != wanted_release(),
    reason=f"makes the code again, which needs grpcio-tools {wanted_release()}; {installed_release()} is installed",
)
def test_the_committed_code_is_what_the_script_makes(tmp_path: Path):
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([str(SCRIPT), str(tmp_path)], check=True, env=environment, timeout=120)
    made = (tmp_path / CODE).read_text()
    assert made == (REPOSITORY / CODE).read_text(), f"{CODE.name} is stale: run {SCRIPT.name}"


def test_the_committed_code_describes_the_committed_protocol():
    """Without the compiler: every message, field and number of sync.proto is in the code, and nothing else."""
    from megatron_ext.sync_service.protocol import sync_pb2

    text = re.sub(r"//.*", "", (REPOSITORY / "megatron_ext" / "sync_service" / "protocol" / "sync.proto").read_text())
    written = {
        (message, name, int(number))
        for message, body in re.findall(r"message (\w+) \{((?:[^{}]|\{[^{}]*\})*)\}", text)
        for name, number in re.findall(r"(\w+) = (\d+);", re.sub(r"enum \w+ \{[^}]*\}", "", body))
    }
    compiled = {
        (name, field.name, field.number)
        for name, message in sync_pb2.DESCRIPTOR.message_types_by_name.items()
        for field in message.fields
    }
    assert written == compiled and len(written) > 30
    methods = sync_pb2.DESCRIPTOR.services_by_name["SyncService"].methods_by_name
    assert set(re.findall(r"rpc (\w+)\(", text)) == set(methods)


@pytest.mark.parametrize("words", [["--check"], ["missing"], [".", "more"]], ids=["option", "missing", "two"])
def test_the_script_refuses_in_one_line_what_it_cannot_write_into(words: list[str]):
    done = subprocess.run([str(SCRIPT), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: '{' '.join(words)}' is not a folder; give one that is there, or nothing for the repository (--help "
        "tells more)\n"
    )


def test_the_script_says_which_tools_are_missing(tmp_path: Path):
    environment = {**os.environ, "PYTHON": str(tmp_path / "python")}
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2 and f"install grpcio-tools=={wanted_release()}" in done.stderr
