# SPDX-License-Identifier: Apache-2.0
"""A link between a peer and the server that the driver can cut in one direction, slow down, and let flip bits."""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import suppress

__all__ = ["DataFrames", "Direction", "Records", "Relay"]

_CHUNK = 1 << 14
_POLL_SECONDS = 0.02
_BULK = 8192
"""Bytes of an HTTP/2 frame from which it carries values. All else, also what a job of many tensors asks for, has no
checksum but TCP's and TLS'."""


class Direction:
    """What one direction of all connections of a link is like."""

    def __init__(self) -> None:
        self.is_open = True
        """Whether bytes pass; those that do not are kept, as a sender's system keeps them."""
        self.rate: float | None = None
        """Bytes per second; None for all that come."""
        self.flips = 0
        """Bits that are yet to be flipped, one in each frame of values."""

    def delay(self, size: int) -> None:
        """Wait until this many bytes may have passed."""
        if self.rate is not None:
            time.sleep(size / self.rate)
        while not self.is_open:
            time.sleep(_POLL_SECONDS)


class DataFrames:
    """Follows the frames of an HTTP/2 connection, in order to know where values are."""

    _PREFACE = 24
    _HEAD = 9

    def __init__(self, *, is_up: bool, dice: random.Random) -> None:
        """Begin with a connection, of which the caller's direction has a preface."""
        self._skip = self._PREFACE if is_up else 0
        self._head = b""
        self._payload = 0
        self._flip_at = -1
        self._dice = dice

    def passed(self, data: bytes, direction: Direction) -> bytes:
        """Return bytes as they arrive, with flipped bits where the direction has some to flip."""
        found, at = bytearray(data), 0
        while at < len(found):
            if self._skip:
                step = min(self._skip, len(found) - at)
                self._skip -= step
            elif self._payload:
                step = min(self._payload, len(found) - at)
                if 0 <= self._flip_at < step:
                    found[at + self._flip_at] ^= 1 << self._dice.randrange(8)
                self._flip_at -= step
                self._payload -= step
            else:
                step = min(self._HEAD - len(self._head), len(found) - at)
                self._head += found[at : at + step]
                if len(self._head) == self._HEAD:
                    self._begin_frame(direction)
            at += step
        return bytes(found)

    def _begin_frame(self, direction: Direction) -> None:
        self._payload, kind = int.from_bytes(self._head[:3]), self._head[3]
        self._head, self._flip_at = b"", -1
        if kind == 0 and self._payload >= _BULK and direction.flips > 0:
            direction.flips -= 1
            # In the second half: in front are the names of the caller and the tensor.
            self._flip_at = self._dice.randrange(self._payload // 2, self._payload)


class Records:
    """Flips bits of an encrypted connection, which ends by that."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def passed(self, data: bytes, direction: Direction) -> bytes:
        """Return bytes as they arrive."""
        if direction.flips <= 0 or len(data) < _BULK:
            return data
        direction.flips -= 1
        found = bytearray(data)
        found[self._dice.randrange(len(found))] ^= 1 << self._dice.randrange(8)
        return bytes(found)


class Relay:
    """Listens for one peer, and passes on what comes to a port of this machine, and back."""

    def __init__(self, port: int, seed: int, *, is_encrypted: bool = False) -> None:
        """Begin to listen.

        Args:
            port: of this machine.
            seed: decides which bits are flipped.
            is_encrypted: whether frames cannot be told, so that a bit may be flipped wherever many bytes come at once.
        """
        self._is_encrypted = is_encrypted
        self.up, self.down = Direction(), Direction()
        self._target, self._dice = port, random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections, and let those that are waiting go."""
        self._listener.close()
        self.repair()

    def repair(self) -> None:
        """Be a good link."""
        for direction in (self.up, self.down):
            direction.is_open, direction.rate, direction.flips = True, None, 0

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:  # the server is away, which its machine would say as well
            caller.close()
            return
        for side in (caller, server):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=self._pump, args=(server, caller, self.down, False), daemon=True)
        back.start()
        self._pump(caller, server, self.up, True)
        back.join()
        caller.close()
        server.close()

    def _pump(self, source: socket.socket, target: socket.socket, direction: Direction, is_up: bool) -> None:
        dice = random.Random(self._dice.random())
        frames = Records(dice) if self._is_encrypted else DataFrames(is_up=is_up, dice=dice)
        with suppress(OSError):  # either side is gone
            while data := source.recv(_CHUNK):
                direction.delay(len(data))
                target.sendall(frames.passed(data, direction))
        for side, how in ((target, socket.SHUT_RDWR), (source, socket.SHUT_RDWR)):
            with suppress(OSError):  # it is gone already
                side.shutdown(how)
