# SPDX-License-Identifier: Apache-2.0
"""Servers for the tests of predictions."""

from tests.sync_service.conftest import zygote  # noqa: F401  # fixture
