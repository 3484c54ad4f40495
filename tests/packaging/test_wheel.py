# SPDX-License-Identifier: Apache-2.0
"""The wheel: complete, without a path into the checkout, and working elsewhere."""

import json
import os
import re
import subprocess
import sys
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from megatron_ext.patching import MEGATRON_VERSIONS
from tests.packaging.machines import ROOT, BuiltWheel
from tests.support.megatron_checkout import python_path

# Runs the console command's function for each command line and reports on standard error which files of the checkout
# were opened meanwhile. The environment of the tests may lie inside the checkout; its own files do not count.
WATCHED = """
import json, os, sys
root, lines = sys.argv[1], json.loads(sys.argv[2])
inside = lambda path: path.startswith(root + os.sep) and not path.startswith(sys.prefix + os.sep)
seen = set()
def watch(event, args):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(args[0], (str, bytes, os.PathLike)):
        path = os.path.abspath(os.fsdecode(args[0]))
        if inside(path) and path not in seen:
            seen.add(path)
            os.write(2, f"OPENED {path}\\n".encode())
sys.addaudithook(watch)
import megatron_ext
print("PACKAGE", megatron_ext.__file__)
from megatron_ext.cli.main import main
for line in lines:
    sys.argv = ["megatron-ext", *line]
    print("STARTED", line)
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code
    assert not code, (line, code)
"""


@pytest.fixture(scope="module")
def metadata(wheel: BuiltWheel) -> Message:
    (content,) = [text for name, text in wheel.texts().items() if name.endswith(".dist-info/METADATA")]
    return BytesParser().parsebytes(content)


@pytest.fixture(scope="module")
def installed(wheel: BuiltWheel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target)]
    done = subprocess.run([*command, str(wheel.file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_every_file_of_the_package_is_in_the_wheel(wheel: BuiltWheel) -> None:
    package = wheel.sources / "megatron_ext"
    wanted = {str(path.relative_to(wheel.sources)) for path in package.rglob("*") if path.is_file()}
    packed = {name for name in wheel.texts() if not name.split("/")[0].endswith(".dist-info")}
    assert "megatron_ext/py.typed" in wanted
    assert packed == wanted


def test_no_file_of_the_wheel_names_the_checkout(wheel: BuiltWheel) -> None:
    for name, text in wheel.texts().items():
        for folder in (ROOT, wheel.sources):
            assert str(folder).encode() not in text, f"{name} contains the path {folder}"


def test_the_metadata_is_what_the_documentation_says(wheel: BuiltWheel, metadata: Message) -> None:
    assert metadata["Name"] == "megatron-ext"
    assert metadata["Requires-Python"] == ">=3.12"
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    base = {req.name: req for req in requirements if req.marker is None}
    assert set(base) == {"torch", "numpy", "packaging", "megatron-core", "psutil"}
    releases = ("0.17.9", "0.18.2", "0.19.2", "0.20.0", "0.21.0")
    assert [base["megatron-core"].specifier.contains(r) for r in releases] == [False, True, True, True, False]
    assert str(base["megatron-core"].specifier) == str(SpecifierSet(MEGATRON_VERSIONS))
    extras = {"sync", "spes", "hot-switch", "te", "async", "muon", "instances", "plots", "data", "convert", "eval"}
    extras |= {"all", "docs", "tests", "dev"}
    assert extras == set(metadata.get_all("Provides-Extra", []))
    texts = {name.split("/", 1)[-1]: text for name, text in wheel.texts().items()}
    assert b"megatron-ext = megatron_ext.cli.main:main" in texts["entry_points.txt"]
    assert any(name.endswith("LICENSE") for name in texts)


def test_the_constraints_pin_every_requirement_within_its_range(metadata: Message) -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert version, f"constraints.txt: {line!r} is not an exact pin"
            pins[canonicalize_name(name)] = version
    script = (ROOT / "scripts/lib/python_env.sh").read_text()
    match = re.search(r'^PYTHON_ENV_EXTRAS="(.*)"$', script, re.MULTILINE)
    assert match is not None
    extras = ["", *match.group(1).split(",")]
    checked = 0
    for req in map(Requirement, metadata.get_all("Requires-Dist", [])):
        if req.marker is None or any(req.marker.evaluate({"extra": extra}) for extra in extras):
            assert canonicalize_name(req.name) in pins, f"constraints.txt does not pin {req.name}"
            pin = pins[canonicalize_name(req.name)]
            assert req.specifier.contains(pin), f"constraints.txt: {req.name}=={pin}, setup.py: {req}"
            checked += 1
    assert checked >= 12


COMMANDS = [["--help"], ["patches"], ["doctor", "--json"], ["data", "--help"]]


def test_the_commands_work_from_elsewhere_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(ROOT), json.dumps(COMMANDS)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(installed)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    head, *answers = done.stdout.split("STARTED ")
    assert head == f"PACKAGE {installed}/megatron_ext/__init__.py\n"
    assert len(answers) == len(COMMANDS) and all(len(answer.splitlines()) > 1 for answer in answers)
    assert "OPENED" not in done.stderr
