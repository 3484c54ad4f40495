# SPDX-License-Identifier: Apache-2.0
"""What documentation and messages tell people to install can be installed: no index has this package."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_ext.extras import EXTRAS, pip_install, pip_install_extra
from tests.packaging.machines import ROOT

DEVELOPERS = {"docs", "tests", "dev"}
"""Extras that setup.py adds."""


def texts() -> list[Path]:
    found = [path for folder in ("docs", "examples", "configs", "patches") for path in (ROOT / folder).rglob("*")]
    found += [*(ROOT / "megatron_ext").rglob("*.py"), *ROOT.glob("*.md"), ROOT / "constraints.txt"]
    return [path for path in found if path.suffix in {".md", ".py", ".sh", ".txt", ".yaml", ".toml"}]


def test_nothing_tells_to_install_this_package_from_an_index():
    asked = re.compile(r"""pip3? install[^`;#\n]*['" ]megatron[-_]ext\b""")
    found = [str(path) for path in texts() if asked.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_every_extra_that_is_named_in_a_command_exists():
    named = {
        extra
        for path in texts()
        for extras in re.findall(r"(?:['\" ]\.|\.whl\)?)\[([a-z,-]+)\]", path.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    assert {"sync", "all"} <= named <= {*EXTRAS, *DEVELOPERS}


def test_the_page_lists_every_extra_with_its_packages():
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = {
        name: packages.strip()
        for names, packages in re.findall(r"^\| (`[a-z-]+`(?:, `[a-z-]+`)*) \|([^|]*)\|", text, re.MULTILINE)
        for name in re.findall(r"`([a-z-]+)`", names)
    }
    assert set(rows) == {*EXTRAS, *DEVELOPERS}
    for extra, requirements in EXTRAS.items():
        if extra not in ("spes", "all"):
            assert {Requirement(text).name for text in requirements} == set(rows[extra].split(", ")) - {""}
    assert EXTRAS["spes"] == EXTRAS["sync"]
    assert set(EXTRAS["all"]) == {one for extra in EXTRAS if extra not in ("te", "async") for one in EXTRAS[extra]}


def test_commands_in_messages_name_requirements():
    assert pip_install("pyarrow") == "pip install 'pyarrow>=16'"
    assert pip_install("lm-eval") == "pip install 'lm-eval[hf]>=0.4.9'"
    assert pip_install_extra("async") == "pip install 'nvidia-resiliency-ext>=0.6'"
    with pytest.raises(KeyError):
        pip_install("grpc")
