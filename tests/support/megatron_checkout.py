# SPDX-License-Identifier: Apache-2.0
"""`pytest --megatron=CHECKOUT`: run the tests against a Megatron-LM checkout instead of the installed package.

What the tests import, and every process that they start, finds the checkout's `megatron` first. Only that folder is
put on the search path: a checkout has a `tests` and an `examples` of its own.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["python_path", "use"]

_HELPERS = Path("megatron", "core", "datasets")
_folder: Path | None = None


@contextmanager
def use(checkout: Path) -> Iterator[None]:
    """Let this process, and all that it starts, find the checkout's Megatron before the installed one.

    Raises:
        pytest.UsageError: there is no Megatron, or what is compiled in it is missing.
    """
    global _folder
    check(checkout)
    with tempfile.TemporaryDirectory(prefix="megatron-") as folder, pytest.MonkeyPatch.context() as patch:
        _folder = Path(folder)
        (_folder / "megatron").symlink_to(checkout.resolve() / "megatron")
        patch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
        # `syspath_prepend` would drop what is imported already.
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path.remove(folder)
            _folder = None


def check(checkout: Path) -> None:
    """Refuse a folder that the tests could not run against.

    Raises:
        pytest.UsageError: as for `use`.
    """
    if not (checkout / "megatron" / "core" / "package_info.py").exists():
        raise pytest.UsageError(
            f"--megatron {checkout}: no megatron/core there; give the root of a Megatron-LM checkout"
        )
    if not list((checkout / _HELPERS).glob("helpers_cpp*.so")):
        raise pytest.UsageError(
            f"--megatron {checkout}: its data helpers are not compiled; run `make -C {checkout / _HELPERS}`, which "
            "needs pybind11"
        )


def python_path(*folders: os.PathLike[str] | str) -> str:
    """Return a PYTHONPATH of these folders alone, behind the checkout under test where there is one."""
    return os.pathsep.join(map(os.fspath, [*filter(None, [_folder]), *folders]))
