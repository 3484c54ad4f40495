# SPDX-License-Identifier: Apache-2.0
"""The methods of the protocol at a server that is not the first one.

It takes and sends values, and does what the first one asks for. All else peers and people have to ask the first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from megatron_ext.sync_service.callers.origin import Origin
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.server.shard_run import ShardRun
from megatron_ext.sync_service.server.shard_secret import ShardSecret
from megatron_ext.sync_service.server.values_servicer import ValuesServicer, check_protocol, served

__all__ = ["ShardServicer"]


class ShardServicer(ValuesServicer):
    """Answers calls at a shard."""

    def __init__(self, runs: Mapping[str, ShardRun], shard: int, first: str, secret: ShardSecret) -> None:
        """Take the runs by their name, the number of this shard, the first server's address, and what that shows."""
        super().__init__(runs)
        self._secret = secret
        self._shard_runs = runs
        self._refusal = f"this is shard {shard}, which has a part of the values; ask the first server, at {first}"

    def Shard(self, request: Any, origin: Origin) -> Any:
        """Do what the first server asks for."""
        self._secret.check(origin.metadata)
        check_protocol(request.protocol, "first server")
        return served(self._shard_runs, request.run).answer(request)

    def awaited(self, _request: Any) -> NoReturn:
        """Refuse to say how a round is."""
        raise Refusal("state", self._refusal)

    def _refuse(self, _request: Any, _origin: Origin) -> NoReturn:
        raise Refusal("state", self._refusal)

    Register = Resume = Heartbeat = Commit = Await = Leave = Status = Evict = Drain = _refuse
