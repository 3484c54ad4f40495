# SPDX-License-Identifier: Apache-2.0
"""Packages of others, as an installer leaves them."""

from pathlib import Path

import pytest


def write_package(
    folder: Path, group: str, package: str, code: str, value: str, name: str = "", version: str = "1.0"
) -> None:
    """Write a package of one module with one entry point.

    Args:
        folder: where Python will find it.
        group: of the entry point, without the 'megatron_ext.' before it.
        package: its name and its module's.
        code: of the module.
        value: of the entry point.
        name: of the entry point; the package's unless given.
        version: of the package.
    """
    (folder / f"{package}.py").write_text(code)
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[megatron_ext.{group}]\n{name or package} = {value}\n")


def installed(
    folder: Path,
    group: str,
    package: str,
    code: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    name: str = "",
) -> None:
    """Put a package with an entry point where Python finds it; as `write_package`."""
    write_package(folder, group, package, code, value, name)
    monkeypatch.syspath_prepend(str(folder))
