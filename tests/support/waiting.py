# SPDX-License-Identifier: Apache-2.0
"""Waiting for something that another process or thread does."""

import time
from collections.abc import Callable
from typing import Any

__all__ = ["PATIENCE", "until"]

PATIENCE = 240.0
"""Seconds that a busy machine may take for anything that tests wait for: they only end what would never come."""


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Wait for something, and return what the condition returned at last."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.02)
    return found
