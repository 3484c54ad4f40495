# SPDX-License-Identifier: Apache-2.0
"""The package stays one that a newcomer finds the way in: rooms of a size, no circles between them, names that tell."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_ext"
MOST_MODULES = 22
"""In a folder."""

RECURRING = {"__init__", "__main__", "feature", "config", "arguments", "checkpoint"}
"""Names of files that say the same in every folder."""

FORMER = {"sync_service/client.py", "sync_service/connection.py"}
"""Where programs still find what has moved."""


def sources() -> list[Path]:
    found = [path for path in sorted(PACKAGE.rglob("*.py")) if str(path.relative_to(PACKAGE)) not in FORMER]
    assert len(found) > 250
    return found


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room(parts: tuple[str, ...]) -> str:
    """Return the room of a module: its folder, or itself where it is at the front of a folder with rooms."""
    folder = PACKAGE.joinpath(*parts[:-1])
    is_front = any((entry / "__init__.py").is_file() for entry in folder.iterdir())
    return ".".join(parts if is_front else parts[:-1])


def imported(module: ast.Module) -> Iterator[tuple[str, ...]]:
    """Yield the modules of the package that one imports, wherever in it and for types too."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *parts = name.split(".")
            if first != "megatron_ext":
                continue
            if not PACKAGE.joinpath(*parts).with_suffix(".py").is_file():
                is_folder = PACKAGE.joinpath(*parts).is_dir()
                parts = [*parts, "__init__"] if is_folder else parts[:-1]
            if PACKAGE.joinpath(*parts).is_dir():
                parts = [*parts, "__init__"]
            yield tuple(parts)


def test_no_circle_of_imports_joins_two_rooms():
    after: dict[str, set[str]] = defaultdict(set)
    for path in sources():
        own = room(path.relative_to(PACKAGE).with_suffix("").parts)
        after[own] |= {room(parts) for parts in imported(tree(path))} - {own}
    assert "sync_service.protocol" in after["sync_service.values"]

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        ahead = [start]
        while ahead:
            for other in after[ahead.pop()] - found:
                found.add(other)
                ahead.append(other)
        return found

    assert [name for name in sorted(after) if name in reached(name)] == []


def test_a_peers_side_depends_on_neither_the_server_nor_megatron():
    for path in (PACKAGE / "sync_service" / "peer").glob("*.py"):
        for parts in imported(tree(path)):
            assert parts[:2] not in {("sync_service", place) for place in ("server", "shards", "rounds", "megatron")}
            assert parts[0] in {"sync_service", "errors", "outer", "transport", "params", "config_options"}, parts


def test_the_outer_round_needs_no_feature_and_no_process_groups():
    helpers = {"errors", "config_options", "phrases", "plugins"}
    for path in (PACKAGE / "outer").rglob("*.py"):
        assert {parts[0] for parts in imported(tree(path))} <= {"outer", *helpers}
        assert "torch.distributed" not in path.read_text()


def test_no_folder_has_more_modules_than_a_reader_can_survey():
    counts: dict[Path, int] = defaultdict(int)
    for path in sources():
        counts[path.parent] += 1
    assert {str(folder): count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_a_file_name_recurs_only_where_it_says_the_same():
    places = defaultdict(list)
    for path in sources():
        places[path.stem].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in RECURRING} == {}


def test_no_two_public_classes_have_one_name():
    places = defaultdict(list)
    for path in sources():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_every_file_of_the_package_that_scripts_and_documents_name_is_there():
    named = 0
    for folder in ("examples", "docs", "scripts", "configs", "benchmarks"):
        for path in sorted((PACKAGE.parent / folder).rglob("*")):
            if path.suffix not in {".sh", ".md", ".py", ".yaml"}:
                continue
            for file in re.findall(r"\bmegatron_ext/[\w/]+\.(?:py|txt|proto|yaml)\b", path.read_text(encoding="utf-8")):
                assert (PACKAGE.parent / file).is_file(), f"{path}: {file}"
                named += 1
    assert named > 20
