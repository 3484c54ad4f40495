# SPDX-License-Identifier: Apache-2.0
"""Failpoints: places at which a test lets the server die as if the power had gone.

Nothing happens at any of them unless the server was started with one by name.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence

from megatron_ext.errors import UserError

__all__ = ["FAILPOINTS", "Failpoints"]

FAILPOINTS = (
    "frame_spooled",
    "upload_checked",
    "upload_journaled",
    "round_closed",
    "tensor_reduced",
    "layer_merged",
    "snapshot_written",
    "snapshot_renamed",
    "round_committed",
    "round_told",
)
"""In the order in which a round passes them."""


class Failpoints:
    """Ends the process with SIGKILL at the n-th time that it comes to a place."""

    def __init__(self, armed: Sequence[str] = ()) -> None:
        """Take the places.

        Args:
            armed: NAME, or NAME:N for the N-th time.

        Raises:
            UserError: there is no such place.
        """
        self._left: dict[str, int] = {}
        self._lock = threading.Lock()
        for text in armed:
            name, _, times = text.partition(":")
            if name not in FAILPOINTS or not (times or "1").isdecimal():
                raise UserError(f"--failpoint {text!r} is not one; use NAME or NAME:N with {', '.join(FAILPOINTS)}")
            self._left[name] = int(times or "1")

    def hit(self, name: str) -> None:
        """Say that the process has come to a place."""
        if name not in self._left:
            return
        with self._lock:
            self._left[name] -= 1
            if self._left[name] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
