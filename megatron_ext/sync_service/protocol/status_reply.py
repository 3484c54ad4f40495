# SPDX-License-Identifier: Apache-2.0
"""The status of a server as its callers read it; see status.py for what it writes."""

from __future__ import annotations

from typing import Any

from megatron_ext.sync_service.protocol.schema import (
    LARGEST_COUNT,
    flag,
    having,
    integer,
    list_of,
    map_of,
    name,
    optional,
    parse,
    text,
)

__all__ = ["read_status"]

_SHARD = having(shard=integer(), address=text(), problem=text())
_PEER = having(
    peer=name,
    index=integer(),
    uploaded=flag,
    awaited=flag,
    missed=integer(),
    bytes_uploaded=integer(0, LARGEST_COUNT),
)
_RUN = having(
    run=name,
    newest_round=optional(integer()),
    digest=optional(text()),
    waiting_for=text(),
    problem=text(),
    asynchronous=flag,
    quorum=integer(),
    places=integer(),
    rejected=map_of(name, text()),
    shards=list_of(_SHARD),
    peers=list_of(_PEER),
)
_STATUS = having(runs=list_of(_RUN))


def read_status(content: str) -> dict[str, Any]:
    """Return what a server's StatusReply says; servers of later releases may say more.

    Raises:
        Malformed: it is something else.
    """
    return _STATUS(parse(content), "status")
