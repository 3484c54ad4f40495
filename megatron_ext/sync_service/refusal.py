# SPDX-License-Identifier: Apache-2.0
"""What the service answers to a request that it does not carry out."""

from __future__ import annotations

from typing import Literal

__all__ = ["NotWhole", "Reason", "Refusal"]

Reason = Literal["invalid", "state", "denied", "not_found", "damaged", "later"]
"""invalid: the request is wrong in itself. state: not now, or not by this caller. denied: the caller is out.
not_found: there is no such thing. damaged: bytes changed on the way, send them again. later: try again."""


class Refusal(Exception):
    """A request is refused; nothing has changed. The message says why and what to do."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class NotWhole(Refusal):
    """A contribution lacks something that its peer has to upload (again)."""

    def __init__(self, message: str) -> None:
        super().__init__("state", message)
