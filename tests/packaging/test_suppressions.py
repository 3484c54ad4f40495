# SPDX-License-Identifier: Apache-2.0
"""Whatever silences a tool, skips a test or catches every error says beside it why."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("megatron_ext", "tests", "benchmarks", "examples", "scripts")
SILENCED = re.compile(r"#\s*(?:type:\s*ignore(?:\[[^]]*\])?|noqa(?::[\sA-Z0-9,]*[0-9])?)(?P<rest>.*)")
SHELL = re.compile(r"#\s*shellcheck disable=\S+(?P<rest>.*)")
SKIPS = {"skip", "skipif", "xfail", "importorskip"}
"""Names of pytest, whose reason is an argument."""

EVERYTHING = {"Exception", "BaseException"}


def comments_of(source: str) -> dict[int, tuple[str, bool]]:
    """Return by line its comment, and whether there is nothing else in the line."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found[token.start[0]] = (token.string, not token.line[: token.start[1]].strip())
    return found


def says_something(text: str) -> bool:
    return re.search(r"[a-z]{2}", text) is not None


def catches_everything(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(each is None or (isinstance(each, ast.Name) and each.id in EVERYTHING) for each in kinds)


def needs_comment(node: ast.AST) -> bool:
    """Return whether something catches every error, or silences warnings."""
    if isinstance(node, ast.ExceptHandler):
        return catches_everything(node.type)
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func).rpartition(".")[2]
    if name == "suppress":
        return any(catches_everything(argument) for argument in node.args)
    first = node.args[0] if node.args else None
    is_ignored = isinstance(first, ast.Constant) and first.value == "ignore"
    return name in ("simplefilter", "filterwarnings") and is_ignored


def skips_silently(node: ast.AST, called: set[ast.AST]) -> bool:
    """Return whether a skip of pytest's has no reason as an argument."""
    if isinstance(node, ast.Attribute):
        # A mark that is not called: `@pytest.mark.skip`.
        return ast.unparse(node).startswith("pytest.mark.") and node.attr in SKIPS and node not in called
    if not isinstance(node, ast.Call) or not re.match(r"pytest\.(mark\.)?\w+$", ast.unparse(node.func)):
        return False
    name = ast.unparse(node.func).rpartition(".")[2]
    reasons = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
    if name == "skip":
        reasons += node.args[:1]
    return name in SKIPS and not any(says_something(ast.unparse(reason)) for reason in reasons)


def unexplained(source: str) -> Iterator[int]:
    """Yield the lines of Python code with something that lacks a reason."""
    comments = comments_of(source)

    def is_explained_above(line: int) -> bool:
        text, is_alone = comments.get(line - 1, ("", False))
        return is_alone and says_something(text)

    for line, (text, _) in comments.items():
        silenced = SILENCED.search(text)
        if silenced and not says_something(silenced["rest"]) and not is_explained_above(line):
            yield line
    nodes = list(ast.walk(ast.parse(source)))
    called: set[ast.AST] = {node.func for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if needs_comment(node):
            line = getattr(node, "lineno", 0)
            if not says_something(comments.get(line, ("", False))[0]) and not is_explained_above(line):
                yield line
        elif skips_silently(node, called):
            yield getattr(node, "lineno", 0)


def unexplained_in_shell(source: str) -> Iterator[int]:
    """Yield the lines of a shell script in which a check is disabled without a reason."""
    for line, text in enumerate(source.splitlines(), start=1):
        disabled = SHELL.search(text)
        if disabled and not says_something(disabled["rest"]):
            yield line


def test_whatever_is_silenced_skipped_or_caught_whole_has_its_reason_beside_it():
    checks = {".py": unexplained, ".sh": unexplained_in_shell}
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in checks]
    paths = [path for path in paths if not path.name.endswith("_pb2.py")]
    assert len(paths) > 1000
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in paths
        for line in sorted(checks[path.suffix](path.read_text(encoding="utf-8")))
    ]
    assert not found, "say in the same line or the one above why this is right there: " + ", ".join(found)


HANDLER = "try:\n    f()\nexcept {}\n    pass\n"
EXPLAINED = {
    "noqa": "x = f()  # noqa: E501  # a table",
    "above": "# torch gives it no types\nx = f()  # type: ignore[no-untyped-call]",
    "named": HANDLER.format("OSError:"),
    "handler": HANDLER.format("Exception:  # raised by plugins"),
    "skip": "pytest.skip('no disk')",
    "mark": "@pytest.mark.skipif(a, reason=f'needs {b}')\ndef f(): pass",
    "text": "x = '# noqa'",
}
NOT = {
    "noqa": "x = f()  # noqa: E501",
    "all": "x = f()  # noqa",
    "type": "x = f()  # type: ignore[no-untyped-call]",
    "bare": HANDLER.format(":"),
    "one-of-two": HANDLER.format("(OSError, BaseException):"),
    "suppress": "with contextlib.suppress(Exception): f()",
    "warnings": "warnings.simplefilter('ignore')",
    "skip": "pytest.skip()",
    "mark": "@pytest.mark.skip\ndef f(): pass",
    "xfail": "@pytest.mark.xfail(strict=True)\ndef f(): pass",
    "module": "pytest.importorskip('pyarrow')",
}


@pytest.mark.parametrize("what", EXPLAINED)
def test_a_reason_is_found_where_it_is(what: str):
    assert list(unexplained(EXPLAINED[what])) == []


@pytest.mark.parametrize("what", NOT)
def test_what_has_no_reason_is_found(what: str):
    assert len(list(unexplained(NOT[what]))) == 1


def test_a_check_of_shellcheck_is_disabled_with_a_reason():
    assert list(unexplained_in_shell("# shellcheck disable=SC2086 # no word\n# shellcheck disable=SC2086\n")) == [2]
