# SPDX-License-Identifier: Apache-2.0
"""The security page promises nothing without a test: every test that it names exists, and every promise names one."""

import ast
import re

import pytest

from tests.packaging.machines import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def names_in(file: str) -> set[str]:
    """Return the tests in a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_test_that_the_page_names_exists(file: str):
    assert {name for at, name in NAMED if at == file} - names_in(file) == set()


def test_every_promise_names_a_test():
    section = PAGE[PAGE.index("## Each promise and its test") : PAGE.index("## The journal grows")]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    for promise, tests in rows:
        names = tests.split(",")
        assert names and all(re.fullmatch(r"\s*`tests/[\w/]+\.py::test_\w+`\s*", name) for name in names), promise


def test_all_tests_of_security_are_on_the_page():
    folder = ROOT / "tests" / "sync_service" / "security"
    of_corpus = {
        "test_the_corpus_has_messages_to_every_method",
        "test_hostile_frames_are_refused_before_anything_is_made_of_them",
    }
    for path in folder.glob("test_*.py"):
        file = str(path.relative_to(ROOT))
        assert names_in(file) - of_corpus == {name for at, name in NAMED if at == file}, file
