# SPDX-License-Identifier: Apache-2.0
"""Where a Megatron tree defines a name and with which parameters, read from its source without importing it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from megatron_ext.errors import UserError

__all__ = ["Definition", "ForkSource", "Missing"]

_PACKAGE_INFO = Path("megatron", "core", "package_info.py")


@dataclass(frozen=True)
class Definition:
    """Where a name is defined."""

    module: str
    """The module whose source has it; another one than was asked for where that only imports the name."""

    attribute: str
    """Its name there, with the class in front where there is one."""

    line: int
    """Of the definition, counted from 1."""

    parameters: tuple[str, ...] | None
    """Of a function or method, in order; None for anything else."""


@dataclass(frozen=True)
class Missing:
    """Why a name is not found."""

    what: str


@dataclass(frozen=True)
class _Place:
    module: str
    node: ast.AST
    attribute: str


class ForkSource:
    """The source of a Megatron tree; each file is parsed once, when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Open the folder that holds `megatron/`.

        Raises:
            UserError: there is no Megatron.
        """
        self.folder = folder
        if not (folder / _PACKAGE_INFO).is_file():
            raise UserError(
                f"{folder}: there is no {_PACKAGE_INFO.as_posix()}; give the folder that holds the fork's megatron/"
            )

    @functools.cached_property
    def version(self) -> Version:
        """The release that the fork says to be, without a suffix of its own.

        Raises:
            UserError: it does not say one.
        """
        tree = self._parse(self.folder / _PACKAGE_INFO)
        numbers: dict[str, str] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                value = str(node.value.value)
                numbers.update({target.id: value for target in node.targets if isinstance(target, ast.Name)})
        try:
            release = ".".join(str(numbers[name]) for name in ("MAJOR", "MINOR", "PATCH"))
            return Version(f"{release}{numbers.get('PRE_RELEASE', '')}")
        except (KeyError, InvalidVersion) as error:
            raise UserError(
                f"{self.folder / _PACKAGE_INFO} does not say Megatron's version as MAJOR, MINOR and PATCH ({error})"
            ) from error

    def file_of(self, module: str) -> Path | None:
        """Return a module's file, relative to the folder; None when there is none."""
        path = Path(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if (self.folder / file).is_file():
                return file
        return None

    def find(self, module: str, attribute: str) -> Definition | Missing:
        """Return where `attribute` of `module` is defined; imports are followed as far as the tree goes.

        Args:
            module: dotted name.
            attribute: `name` or `Class.name`.
        """
        if self.file_of(module) is None:
            return Missing(f"there is no module {module}")
        first, *rest = attribute.split(".")
        place = self._global(module, first, frozenset())
        if place is None:
            return Missing(f"{module} has no {first}")
        for name in rest:
            inner = self._member(place, name, frozenset())
            if inner is None:
                return Missing(f"{place.attribute} in {module} has no {name}")
            place = inner
        return Definition(place.module, place.attribute, getattr(place.node, "lineno", 1), _parameters(place.node))

    def elsewhere(self, attribute: str) -> list[Path]:
        """Return the files, relative to the folder, that define a function or class of an attribute's last name."""
        name = re.escape(attribute.rpartition(".")[2])
        if name.startswith("__"):  # every other class has one
            return []
        pattern = re.compile(rf"^\s*(?:async def|def|class) {name}\b", re.MULTILINE)
        return [file for file, text in self._texts.items() if pattern.search(text)]

    @functools.cached_property
    def _texts(self) -> dict[Path, str]:
        return {
            path.relative_to(self.folder): path.read_text(encoding="utf-8", errors="replace")
            for path in sorted((self.folder / "megatron").rglob("*.py"))
        }

    @functools.cached_property
    def _trees(self) -> dict[str, ast.Module]:
        return {}

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            file = self.file_of(module)
            if file is None:
                return None
            self._trees[module] = self._parse(self.folder / file)
        return self._trees[module]

    def _parse(self, path: Path) -> ast.Module:
        try:
            return ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not Python that this interpreter reads: {error}") from error

    def _global(self, module: str, name: str, seen: frozenset[tuple[str, str]]) -> _Place | None:
        """Find a global of a module; `seen` holds what was asked on the way here, for imports in a circle."""
        tree = self._tree(module)
        if tree is None or (module, name) in seen:
            return None
        seen |= {(module, name)}
        node = _defined(tree.body, name)
        if isinstance(node, ast.ImportFrom):
            origin = self._absolute(module, node)
            inner = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            if self.file_of(origin) is not None:
                found = self._global(origin, inner, seen)
                if found is not None:
                    return found
            return _Place(module, node, name)  # a module, or something from outside the tree
        if node is not None:
            return _Place(module, node, name)
        for statement in _statements(tree.body):
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                found = self._global(self._absolute(module, statement), name, seen)
                if found is not None:
                    return found
        return None

    def _member(self, place: _Place, name: str, seen: frozenset[tuple[str, str]]) -> _Place | None:
        """Find a member of a class: its own, or that of the first base in the tree that has it."""
        if not isinstance(place.node, ast.ClassDef) or (place.module, place.attribute) in seen:
            return None
        node = _defined(place.node.body, name)
        if node is not None:
            return _Place(place.module, node, f"{place.attribute}.{name}")
        for base in place.node.bases:
            if isinstance(base, ast.Name):
                parent = self._global(place.module, base.id, frozenset())
                found = None if parent is None else self._member(parent, name, seen | {(place.module, place.attribute)})
                if found is not None:
                    return found
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        file = self.file_of(module)
        is_package = file is not None and file.name == "__init__.py"
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *filter(None, [node.module])])


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body and those under its conditions, but not those inside functions and classes."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            yield from _statements(statement.body)
            yield from _statements(getattr(statement, "orelse", []))
            yield from _statements(getattr(statement, "finalbody", []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _defined(body: Sequence[ast.stmt], name: str) -> ast.stmt | None:
    """Return the statement that gives `name` its value: the last function or class, else an assignment or import."""
    other: ast.stmt | None = None
    best: ast.stmt | None = None
    for statement in _statements(body):
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            best = statement if statement.name == name else best
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            names = [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
            other = statement if name in names else other
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            assigned = [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
            other = statement if name in assigned else other
    return best or other


def _parameters(node: ast.AST) -> tuple[str, ...] | None:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    given = node.args
    found = [*given.posonlyargs, *given.args, *filter(None, [given.vararg]), *given.kwonlyargs]
    return tuple(argument.arg for argument in [*found, *filter(None, [given.kwarg])])
