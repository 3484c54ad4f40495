# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile installs as docs/install.md says, copies what is there, and leaves the base's torch alone."""

import re
import shlex

from megatron_ext.extras import pip_install_extra
from tests.packaging.documented import commands_of
from tests.support.distributed import REPOSITORY

INSTRUCTIONS = re.sub(r"\\\n\s*", "", (REPOSITORY / "examples/container/Dockerfile").read_text()).splitlines()


def arguments(name: str) -> list[str]:
    return [line.removeprefix(f"{name} ") for line in INSTRUCTIONS if line.startswith(f"{name} ")]


def test_only_these_instructions_are_there_and_the_base_is_an_argument():
    used = {line.split()[0] for line in INSTRUCTIONS if line and not line.startswith("#")}
    assert used == {"ARG", "FROM", "WORKDIR", "COPY", "RUN"}
    (base,) = arguments("ARG")
    assert re.fullmatch(r"BASE=nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", base)
    assert arguments("FROM") == ["${BASE}"]


def test_its_commands_are_those_of_the_page_on_installing():
    page = {command.line for command in commands_of(REPOSITORY / "docs" / "install.md")}
    page.add(" ".join(shlex.split(f"python -m {pip_install_extra('sync')}")))
    run = [" ".join(shlex.split(line)) for line in arguments("RUN")]
    assert [line for line in run if line not in page] == []
    assert run[-1] == "megatron-ext doctor"
    # Whatever depends on torch comes without its dependencies.
    assert all("--no-deps" in line for line in run if line.endswith(" .") or "megatron-core" in line)


def test_what_it_copies_is_there_and_enough_to_install():
    copied = [source for line in arguments("COPY") for source in line.split()[:-1]]
    assert [source for source in copied if not (REPOSITORY / source).exists()] == []
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "megatron_ext"} <= set(copied)
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    assert ".venv" in ignored and not set(copied) & set(ignored)
