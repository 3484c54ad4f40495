# SPDX-License-Identifier: Apache-2.0
"""Servers that have made all rounds of their run, and were killed then."""

import shutil
from collections.abc import Callable, Iterator

import pytest

from tests.sync_service.server.recovery.lost_journals import run_to_the_end
from tests.sync_service.service import Service, Zygote
from tests.sync_service.whole_runs import DILOCO

MakeService = Callable[..., Service]


@pytest.fixture(scope="session")
def finished(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server that was killed after the last of its rounds; it has two snapshots."""
    service = Service(zygote, tmp_path_factory.mktemp("finished"), {"demo": {"peers": 2, **DILOCO}})
    run_to_the_end(service)
    yield service
    service.stop()


@pytest.fixture
def service(finished: Service, make_service: MakeService) -> Service:
    """A server with a copy of that folder."""
    found = make_service(**DILOCO)
    shutil.copytree(finished.state, found.state)
    return found
