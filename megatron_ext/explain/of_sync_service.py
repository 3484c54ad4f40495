# SPDX-License-Identifier: Apache-2.0
"""What a peer of the sync service adds, with or without SPES: what goes to the server and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_ext.explain.lone_rank import LoneRank, without_memory
from megatron_ext.explain.rank_figures import MemoryUse, TrafficUse
from megatron_ext.outer.codecs.codec import Codec
from megatron_ext.params import ParameterView
from megatron_ext.seams.optimizer import InnerValues
from megatron_ext.spes.arguments import ownership_of
from megatron_ext.sync_service.megatron.arguments import SyncServiceConfig
from megatron_ext.sync_service.megatron.slices import Slices, catalog_of
from megatron_ext.sync_service.protocol.frames import codec_of, cut

__all__ = ["PeerOfRank"]

_FRAME_BYTES = 1 << 20
"""Of a peer's client, which a job cannot change."""


class PeerOfRank:
    """What one rank moves for its peer, from the same parts as in a run.

    Upwards go the primary parts that the peer trains, each element from one rank. Downwards come all parts that the
    rank holds but those that this peer alone trains, which the server sends only where they are not what was uploaded.
    """

    def __init__(self, rank: LoneRank, view: ParameterView) -> None:
        """Find the parts.

        Args:
            rank: the rank.
            view: of its model.
        """
        self._config = config = SyncServiceConfig.from_args(rank.asked)
        assert config.sync_service_peers
        self._ownership = ownership_of(rank.asked)
        self._index = config.sync_service_index or 0
        self._codec = codec_of(config.sync_service_codec)
        self._catalog = catalog_of(view, config.sync_service_peers, self._ownership)
        with without_memory():
            parts = Slices(InnerValues(rank.optimizer, view), self._catalog).parts
        up = [part for part in parts if part.is_primary and part.spec.is_trained_by(self._index)]
        places = {(part.spec.name, part.box): part for part in parts}
        down = [part for part in places.values() if part.spec.owners != (self._index,)]
        self._up = [part.box.numel for part in up]
        self._down = [part.box.numel for part in down]
        self._held = [part.box.numel for part in places.values()]

    def memory(self) -> Iterator[MemoryUse]:
        """Yield the copies on the host, all in fp32: what is sent, what has come, and with a codec three more."""
        values = sum(self._up) + sum(self._held)
        if self._config.sync_service_codec != "fp32":
            values += 3 * sum(self._up)
        yield MemoryUse(cause="copies for the sync service", nbytes=4 * values, place="host", by_formula=True)

    def traffic(self) -> Iterator[TrafficUse]:
        """Yield what goes to the server and what comes from it in a round, without the frames' headers."""
        up, down = _nbytes(self._up, self._codec), _nbytes(self._down, self._codec)
        yield TrafficUse(cause="values to the server", nbytes=up, per="interval", across=True)
        yield TrafficUse(
            cause="values from the server, at most",
            nbytes=down,
            per="interval",
            across=True,
            received=True,
            by_formula=True,
        )

    def facts(self) -> dict[str, Any]:
        """Return what the peer is, and what all of its ranks move together at least."""
        config, ownership = self._config, self._ownership
        specs = self._catalog.specs
        up = [spec.numel for spec in specs if spec.is_trained_by(self._index)]
        down = [spec.numel for spec in specs if spec.owners != (self._index,)]
        owners = None
        if ownership is not None:
            owners = [list(ownership.owned_by(peer)) for peer in range(ownership.peers)]
        return {
            "server": config.sync_service,
            "run": config.sync_service_run,
            "peer": config.sync_service_peer,
            "peers": config.sync_service_peers,
            "index": config.sync_service_index,
            "interval": config.sync_service_interval,
            "interval_seconds": config.sync_service_interval_seconds,
            "codec": config.sync_service_codec,
            "experts_of_peers": owners,
            "bytes_up": _nbytes(up, self._codec),
            "bytes_down": _nbytes(down, self._codec),
        }


def _nbytes(sizes: list[int], codec: Codec) -> int:
    """Return the bytes of values that travel in frames of their own."""
    return sum(codec.nbytes(count) for size in sizes for _, count in cut(size, _FRAME_BYTES, codec.grid))
