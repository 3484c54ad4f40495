# SPDX-License-Identifier: Apache-2.0
"""Checks that a patch fits the packages that are installed: version, existence, signature."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import runpy
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_ext.errors import UserError
from megatron_ext.patching.patch import Patch, PatchError, SeamUnavailable

__all__ = ["check", "installed_version", "locate", "version_problem"]


def installed_version(distribution: str) -> Version | None:
    """Return the release in use of `distribution`, None when it is not installed.

    A Megatron-LM checkout has no distribution metadata, so for megatron-core the package speaks for itself; its
    version may carry a `+githash`, which is dropped.
    """
    version = _version_of_megatron() if distribution == "megatron-core" else _version_on_disk(distribution)
    return None if version is None else Version(version.public)


def _version_of_megatron() -> Version | None:
    """Return megatron.core's version, without importing it: that takes seconds, and another release may fail there."""
    info = sys.modules.get("megatron.core.package_info")
    if info is not None:
        return Version(str(info.__version__))
    try:
        package = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:  # there is no folder of that name at all
        return None
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).with_name("package_info.py")
    if not path.exists():
        return None
    try:
        return Version(str(runpy.run_path(str(path))["__version__"]))
    except Exception as error:  # the file may hold anything
        raise UserError(
            f"{path} does not say Megatron's version ({type(error).__name__}: {error}); install megatron-core again"
        ) from error


@functools.cache  # asked for once per patch, and reading it takes milliseconds
def _version_on_disk(distribution: str) -> Version | None:
    try:
        return Version(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None


def version_problem(distribution: str, versions: str) -> str | None:
    """Return why the installed `distribution` is outside `versions`, or None when it is inside."""
    if not versions:
        return None
    found = installed_version(distribution)
    if found is None:
        return f"{distribution} is not installed"
    if not SpecifierSet(versions).contains(found, prereleases=True):
        return f"{distribution} {found} is installed, tested are {versions}"
    return None


def locate(patch: Patch) -> tuple[Any, str, Any]:
    """Import the target and return (owner, attribute name, raw attribute).

    The raw attribute is the one in the owner's `__dict__` where it has one, so that staticmethod and
    classmethod objects are seen as such.

    Raises:
        SeamUnavailable: the installed release is known not to have it.
        PatchError: the module cannot be imported or has no such attribute.
    """
    try:
        owner: Any = importlib.import_module(patch.module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{patch.module}.".startswith(f"{error.name}."):
            _require_known(patch)
        raise PatchError(f"{patch.describe()}: module cannot be imported: {error}") from error
    except Exception as error:  # of whatever the module imports: a missing CUDA library is an OSError
        said = f"module cannot be imported: {type(error).__name__}: {error}"
        raise PatchError(f"{patch.describe()}: {said}") from error
    *path, name = patch.attribute.split(".")
    for part in path:
        if not hasattr(owner, part):
            _require_known(patch)
            raise PatchError(f"{patch.describe()}: {patch.module} has no {part}")
        owner = getattr(owner, part)
    if name in vars(owner):
        return owner, name, vars(owner)[name]
    if not hasattr(owner, name):
        _require_known(patch)
        raise PatchError(f"{patch.describe()}: the target does not exist in the installed version")
    return owner, name, getattr(owner, name)


def _require_known(patch: Patch) -> None:
    """Say in one line that a target is missing where that is known.

    Raises:
        SeamUnavailable: it is; otherwise returns, so that the caller can say what it has seen.
    """
    found = installed_version(patch.distribution)
    if found is not None and patch.missing_from and found in SpecifierSet(patch.missing_from, prereleases=True):
        raise SeamUnavailable(
            f"{patch.distribution} {found} has no {patch.attribute}, which is needed to {patch.reason}; use another "
            f"release than {patch.missing_from}"
        )


def check(patch: Patch) -> tuple[Any, str, Any]:
    """Pass every gate and return what `locate` returns.

    Raises:
        SeamUnavailable: the installed release is known not to have the target.
        PatchError: wrong version, missing target, or a parameter that the target no longer has.
    """
    problem = version_problem(patch.distribution, patch.versions)
    if problem:
        raise PatchError(f"{patch.describe()}: {problem}")
    owner, name, raw = locate(patch)
    if patch.parameters:
        function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
        present = inspect.signature(function).parameters
        missing = [parameter for parameter in patch.parameters if parameter not in present]
        if missing:
            raise PatchError(
                f"{patch.describe()}: the installed target has no parameter {', '.join(missing)} "
                f"(it has {', '.join(present)})"
            )
    return owner, name, raw
