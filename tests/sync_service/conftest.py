# SPDX-License-Identifier: Apache-2.0
"""Servers for the tests of the sync service."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sync_service.service import Service, Zygote
from tests.sync_service.toy_peer import digest
from tests.sync_service.whole_runs import ROUNDS


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


@pytest.fixture(scope="session")
def undisturbed() -> list[str]:
    """Return the digests of the rounds that two peers make when nothing breaks, worked out without a server."""
    from tests.sync_service.rounds.test_rounds_of_peers import expected

    return [digest(values) for values in expected(2, ROUNDS, 7, lr=0.7, momentum=0.9)]
