# SPDX-License-Identifier: Apache-2.0
"""What the tests of all scripts share."""

from pathlib import Path

import pytest

from tests.examples.desk import Desk
from tests.sync_service.conftest import make_service, zygote  # noqa: F401  # fixtures


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """Return a folder to start scripts in."""
    return Desk(folder=tmp_path)
