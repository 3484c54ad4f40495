# SPDX-License-Identifier: Apache-2.0
"""Servers for the tests of conversions."""

from tests.sync_service.conftest import make_service, zygote  # noqa: F401  # fixtures
