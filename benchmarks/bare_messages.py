# SPDX-License-Identifier: Apache-2.0
"""What bare streams move, whatever carries them: zeros in messages of 1 MiB, shared out evenly."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["messages", "parts_of"]

_MESSAGE = bytes(1 << 20)


def messages(count: int) -> Iterator[bytes]:
    """Yield as many zeros."""
    for _ in range(count // len(_MESSAGE)):
        yield _MESSAGE
    if count % len(_MESSAGE):
        yield _MESSAGE[: count % len(_MESSAGE)]


def parts_of(count: int, streams: int) -> list[int]:
    """Return how many of `count` bytes each stream moves."""
    return [count // streams + (index < count % streams) for index in range(streams)]
