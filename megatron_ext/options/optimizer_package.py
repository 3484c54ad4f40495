# SPDX-License-Identifier: Apache-2.0
"""The package that Megatron takes Muon and its family from."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet

from megatron_ext.extras import pip_install_extra

__all__ = ["EMERGING_VERSIONS", "FAMILY", "missing_optimizers"]

FAMILY = ("muon", "dist_muon", "adaptive_muon", "lion", "soap")
"""Values of `--optimizer` that need the package."""

EMERGING_VERSIONS = ">=0.2,<1"
"""Its releases: Megatron takes none before, and what an index may have under its name with version 999 is another."""

_PACKAGE = "emerging-optimizers"


def missing_optimizers(args: Any) -> str | None:
    """Return in words that the package which `--optimizer` asks for is not there, and the way out.

    Args:
        args: Megatron's arguments as parsed.
    """
    if args.optimizer not in FAMILY or args.skip_train:
        return None
    try:
        found = version(_PACKAGE)
    except PackageNotFoundError:
        problem = "is not installed"
    else:
        if SpecifierSet(EMERGING_VERSIONS).contains(found, prereleases=True) and _is_taken():
            return None
        problem = f"is {found}"
    return (
        f"--optimizer {args.optimizer} needs {_PACKAGE}{EMERGING_VERSIONS}, which {problem}; "
        f"{pip_install_extra('muon')}"
    )


def _is_taken() -> bool:
    """Return whether Megatron could import what it needs of it."""
    from megatron.core import optimizer

    return bool(optimizer.HAVE_EMERGING_OPTIMIZERS)
