# SPDX-License-Identifier: Apache-2.0
"""Links that are slow, break, or fall silent, and values that take their time on them."""

import math
import socket
import time
from contextlib import suppress

import torch

from benchmarks.byte_relay import ByteRelay

MIB = 1 << 20
VALUES = {f"layer.{index}": torch.full((MIB // 4,), float(index)) for index in range(8)}


class Link(ByteRelay):
    """A relay that passes on this many bytes per second one way, and from a connection no more than a limit."""

    def __init__(
        self,
        port: int,
        *,
        rate: float = 1e9,
        limit: int = 1 << 40,
        then: str = "break",
        up: bool = False,
        failing: float = math.inf,
    ) -> None:
        """Take `then`, what is after the limit, break or silence, and how many connections are failing: the first."""
        self._rate, self._limit, self._then, self._up, self._failing = rate, limit, then, up, failing
        super().__init__(port)

    def _pass_on(self, source: socket.socket, target: socket.socket, is_up: bool) -> None:
        if is_up != self._up:
            super()._pass_on(source, target, is_up)
            return
        self._failing -= 1
        passed, limit = 0, self._limit if self._failing >= 0 else math.inf
        with suppress(OSError):  # either side is gone
            while data := source.recv(1 << 16):
                if passed + len(data) > limit:
                    while self._then == "silence" and source.recv(1 << 16):
                        pass  # taken, and never answered
                    source.shutdown(socket.SHUT_RDWR)
                    target.shutdown(socket.SHUT_RDWR)
                    return
                target.sendall(data)
                passed += len(data)
                self.up += len(data) * is_up
                self.down += len(data) * (not is_up)
                time.sleep(len(data) / self._rate)
