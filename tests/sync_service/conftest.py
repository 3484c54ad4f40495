# SPDX-License-Identifier: Apache-2.0
"""Servers for the tests of the sync service."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sync_service.service import Service, Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """What forks servers and peers."""
    found = Zygote()
    yield found
    found.close()


@pytest.fixture
def make_service(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Return a function that makes the service of runs; everything is ended after the test."""
    made: list[Service] = []

    def make(runs: dict[str, dict[str, Any]] | None = None, **run: Any) -> Service:
        folder = tmp_path / f"service{len(made)}"
        folder.mkdir()
        made.append(Service(zygote, folder, runs or {"demo": {"peers": 2, **run}}))
        return made[-1]

    yield make
    for service in made:
        service.stop()
