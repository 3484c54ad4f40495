# SPDX-License-Identifier: Apache-2.0
"""What the service answers to a request that it does not carry out."""

from __future__ import annotations

from typing import Literal

__all__ = ["NameInUse", "NotWhole", "Reason", "Refusal", "as_utf8"]

Reason = Literal["invalid", "state", "denied", "not_found", "damaged", "later", "full"]
"""invalid: the request is wrong in itself. state: not now, or not by this caller. denied: the caller is out.
not_found: there is no such thing. damaged: bytes changed in transit, send them again. later: try again.
full: the caller has as much as it may have."""


_LONGEST = 2000
"""Bytes of a message. It travels in the head of an answer, of which gRPC takes a few kilobytes, and may quote what was
sent, which may be far longer."""


class Refusal(Exception):
    """A request is refused; nothing has changed. The message says why and what to do."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(_short(message))
        self.reason: Reason = reason


class NotWhole(Refusal):
    """A contribution lacks something that its peer has to upload (again)."""

    def __init__(self, message: str) -> None:
        super().__init__("state", message)


class NameInUse(Refusal):
    """A process wants the place of a peer that another one has, which is alive as far as is known."""

    def __init__(self, run: str, peer: str, until: float) -> None:
        """Take the run's and the peer's name, and until when (`time.monotonic`) the other process counts as alive."""
        super().__init__(
            "state",
            f"peer {peer!r} is alive in another process, which would end if this one took its place; give this one a "
            "peer name of its own, or say take_over (--sync-service-take-over) if it is to replace the other one",
        )
        self.run, self.peer, self.until = run, peer, until


def as_utf8(text: str) -> str:
    """Return text that can be sent: names of files may have what is none in UTF-8, which is shown as numbers."""
    return text.encode(errors="backslashreplace").decode()


def _short(message: str) -> str:
    """Return a message without the middle of a long one: its beginning says what, and its end what to do."""
    data = message.encode(errors="backslashreplace")
    if len(data) <= _LONGEST:
        return data.decode()
    half = _LONGEST // 2
    return f"{data[:half].decode(errors='ignore')} ... {data[-half:].decode(errors='ignore')}"
