# SPDX-License-Identifier: Apache-2.0
"""How many file descriptors the server's process may have, and how many of them connections may take.

What the runs need for their files is kept free, so that whoever connects, however often, takes none of it.
"""

from __future__ import annotations

import ipaddress
import logging
import resource

from megatron_ext.errors import UserError
from megatron_ext.sync_service.server.config import ServerConfig

__all__ = ["room_for_connections"]

log = logging.getLogger(__name__)

_OF_THE_PROCESS = 128
"""Libraries, logs, gRPC itself, 32 callers of the status page, and files that are open for a moment."""

_OF_A_RUN, _OF_A_PEER = 16, 4
"""The journal, the snapshot that is written, the copy's transfers; contributions and what replaces them."""

_OF_A_SHARD = 2
"""The first server's connection to it, and the one that replaces it once it has been silent."""

_LEAST_OF_PEOPLE, _LEAST_OF_A_PEER = 16, 2
"""Connections without which nobody could use the server. Every rank of a peer has one, which its streams share, and the
first one another for heartbeats. How many ranks a peer has is not known here, so this is a peer of one."""


def room_for_connections(config: ServerConfig) -> int:
    """Raise the process' limit of file descriptors as far as it may, and return how many connections there may be.

    Args:
        config: checked.

    Raises:
        UserError: they are too few for the runs.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        limit = hard
    peers = sum(run.peers for run in config.runs.values())
    others = len(config.runs) * (_OF_A_RUN + config.keep_snapshots + _OF_A_SHARD * len(config.shards))
    files = _OF_THE_PROCESS + others + _OF_A_PEER * peers
    least = _LEAST_OF_PEOPLE + _LEAST_OF_A_PEER * peers
    listeners = _listeners(config.bind.rpartition(":")[0])
    # No limit at all is below 0.
    room = config.connections if limit < 0 else min(config.connections, (limit - files) // listeners)
    if config.connections < least:
        raise UserError(
            f"connections is {config.connections}, and {least} are the least for {peers} places of peers of one rank "
            "each; raise it, by one for every further rank"
        )
    if room < least:
        raise UserError(
            f"the process may have {limit} file descriptors, and its runs need {files + least * listeners}: {files} "
            f"for files, and {least * listeners} for connections of {peers} places of peers of one rank each; raise "
            "its hard limit (ulimit -Hn, or LimitNOFILE= of a systemd unit)"
        )
    log.info(
        "room for %d connections, of which an address has %d until it has shown who it is; %d of the process' %d file "
        "descriptors are kept for files",
        *(room, room // 4, files, limit),
    )
    return room


def _listeners(host: str) -> int:
    """Return at how many addresses gRPC may listen, each of which has as many connections: a name may have two."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return 2
    return 1
