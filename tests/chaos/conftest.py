# SPDX-License-Identifier: Apache-2.0
"""What forks servers and peers."""

from tests.sync_service.conftest import zygote

__all__ = ["zygote"]
