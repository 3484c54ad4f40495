# SPDX-License-Identifier: Apache-2.0
"""Configuration of a peer's client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_ext.errors import UserError
from megatron_ext.outer.codecs.all_codecs import CODECS
from megatron_ext.sync_service.channel.connection import ConnectionConfig
from megatron_ext.sync_service.protocol.durations import (
    HEARTBEAT_SECONDS,
    LONGEST_HEARTBEAT_SECONDS,
    LONGEST_SECONDS,
    can_be_waited,
)
from megatron_ext.sync_service.protocol.names import NAME
from megatron_ext.sync_service.protocol.report import CODEC_PACKAGE, LONGEST_DATA

__all__ = ["ClientConfig"]


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """One peer of one run."""

    connection: ConnectionConfig
    """Where the server is."""

    run: str
    """The run id."""

    peer: str
    """This peer's name, which is its own for the whole run."""

    index: int | None = None
    """Its place among the peers; the lowest free one unless given."""

    peers: int | None = None
    """How many peers there are; the server refuses another number than its own."""

    codec: str = "fp32"
    """How contributions travel: one of `megatron_ext.outer.codecs.all_codecs.CODECS`. All but fp32 lose something,
    which this peer sends along with its next contribution (error feedback). Must be the same for all peers."""

    agreed: Mapping[str, str] = field(default_factory=dict)
    """Whatever else must be the same for all peers, by the name of the field."""

    data: str = ""
    """Which data this peer trains on, in some letters that change with them. The run keeps them with the peer's place
    from its first contribution on, and others are refused there, unless `continue_run` says that they are meant."""

    continue_run: bool = False
    """Continue the run though this peer's place has trained on other `data`."""

    streams: int = 2
    """Parallel streams of an upload or download. The server holds some megabytes for each."""

    frame_bytes: int = 1 << 20
    """Bytes of a frame."""

    call_bytes: int = 8 << 20
    """Bytes of an upload call: what is sent again when one fails."""

    round_seconds: float = 3600.0
    """How long a round is awaited before this peer gives up."""

    heartbeat_seconds: float = HEARTBEAT_SECONDS
    """How often this peer says that it is alive, so that no other process gets its place by mistake; 0 for never. A
    process that is started in the place of a killed one waits until three heartbeats have failed to come."""

    take_over: bool = False
    """Take this peer's place though another process that is alive has it, which is refused from then on."""

    @property
    def coding(self) -> dict[str, str]:
        """What must be the same for all peers and the server about the codec."""
        package = CODECS.package_of(self.codec)
        return {"codec": self.codec, **({} if package is None else {CODEC_PACKAGE: package})}

    def check(self) -> None:
        """Check the values.

        Raises:
            UserError: one cannot be used.
        """
        if not NAME.fullmatch(self.peer):
            raise UserError(f"peer is {self.peer!r}; use up to 64 letters, digits, '.', '_' and '-'")
        if self.index is not None and self.index < 0:
            raise UserError(f"index is {self.index}; it must be 0 or more")
        if self.peers is not None and self.peers < 1:
            raise UserError(f"peers is {self.peers}; it must be 1 or more")
        for name, value in self.agreed.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise UserError(f"agreed has {name!r}: {value!r}; both must be strings")
        if not can_be_waited(self.round_seconds):
            raise UserError(
                f"round_seconds is {self.round_seconds}; it must be above 0 and at most {LONGEST_SECONDS:.0f} (a month)"
            )
        if not 0 <= self.heartbeat_seconds <= LONGEST_HEARTBEAT_SECONDS:
            raise UserError(
                f"heartbeat_seconds is {self.heartbeat_seconds}; it must be 0 to {LONGEST_HEARTBEAT_SECONDS:g}"
            )
        CODECS.find(self.codec)
        if len(self.data) > LONGEST_DATA or not self.data.isprintable():
            raise UserError(
                f"data has {len(self.data)} characters; give at most {LONGEST_DATA} printable ones, such as a digest"
            )
        for name in sorted({"codec", CODEC_PACKAGE} & self.agreed.keys()):
            raise UserError(f"agreed has a field {name!r}, which is sent anyway; drop it")
        if not 4096 <= self.frame_bytes <= 4 << 20:
            raise UserError(f"frame_bytes is {self.frame_bytes}; it must be 4096 to {4 << 20}")
        if self.streams < 1 or self.call_bytes < self.frame_bytes:
            raise UserError("streams must be 1 or more, and call_bytes at least frame_bytes")
