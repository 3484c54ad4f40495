# SPDX-License-Identifier: Apache-2.0
"""Configuration of the server, and reading it and its runs from YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError, combine
from megatron_ext.sync_service.channel.address import is_loopback, split_address
from megatron_ext.sync_service.protocol.durations import can_be_waited
from megatron_ext.sync_service.protocol.message_size import MAX_MESSAGE
from megatron_ext.sync_service.protocol.names import NAME
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.yaml_file import read_yaml

__all__ = ["ServerConfig", "read_config"]

_LEAST = {
    "connections": 16,
    "peer_streams": 1,
    "peer_bytes_in_flight": MAX_MESSAGE,
    "stream_window": 1 << 16,
    "peer_slices": 1,
    "peer_waiting_calls": 1,
    "health_watches": 4,
    "silent_calls": 4,
}
"""Limits of what callers may hold, and how low they may be."""

_LARGEST_WINDOW = (1 << 31) - 1
"""That HTTP/2 knows."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The server: where it keeps its state, where it listens, who may talk to it, and its runs."""

    dir: str
    """Folder of the durable state; made when it is not there."""

    state: str | None = None
    """URL of a copy of that state, such as s3://bucket/folder (through fsspec), from which another machine can resume;
    none unless given. The server that started last owns it."""

    bind: str = "127.0.0.1:50051"
    """Address and port to listen at. Port 0 takes a free one, which is printed."""

    token_file: str | None = None
    """File with the token that every caller has to show."""

    tls_cert: str | None = None
    """PEM file with the server's certificate chain; switches TLS on."""

    tls_key: str | None = None
    """PEM file with the certificate's key."""

    tls_client_ca: str | None = None
    """PEM file with the authority that has to have signed the callers' certificates (mutual TLS)."""

    operators: Sequence[str] = ()
    """Names (common name, or first alternative name) of certificates that may evict peers and drain the server, where
    callers have certificates (tls_client_ca). Besides them, there, only the server's own may."""

    insecure: bool = False
    """Listen at an address that others reach without token and TLS. Anybody there can then take part in the runs."""

    status_port: int | None = None
    """Port of the status page, over plain HTTP; none unless given. Port 0 takes a free one, which is printed."""

    status_host: str = "127.0.0.1"
    """Address of the status page. Everyone who reaches it can read it: names, losses and reasons, but no values."""

    shards: Sequence[str] = ()
    """ADDRESS:PORT of all servers when several have parts of the values, the first one first; peers and the first one
    have to reach them there. None unless given: this server has everything."""

    shard: int = 0
    """Which of them this one is. Peers know the first one, 0, which decides; the others keep values."""

    tls_ca: str | None = None
    """PEM file with the authority that has signed the certificates of the other shards, for the first one."""

    shard_secret_file: str | None = None
    """File with the secret, at least 16 characters, by which the servers in shards know each other. All have the same,
    and no peer has it: its holder can change values. Needed with shards where peers have to show something, a
    token or a certificate; where they need not, everybody who reaches the servers may do everything anyway."""

    connections: int = 8192
    """Connections at a time, as far as the process may have file descriptors; an address has a quarter of them until
    they have shown the token. Where there are more, its oldest ones end."""

    idle_seconds: float = 30.0
    """About how long a connection may be without a call; up to twice as long after one."""

    peer_streams: int = 1024
    """Uploads and downloads of a peer, all of its ranks together, that may be open at a time."""

    peer_bytes_in_flight: int = 256 << 20
    """Bytes of messages of a peer that the server receives, or sends, at a time; further ones wait for their turn. The
    memory for a peer's messages is at most twice as much, and a window for each of its streams."""

    stream_window: int = 4 << 20
    """Bytes of a stream that may come in before anybody reads them. A stream brings no more in the time of a message
    there and back: raise it for peers that are far away on wide links."""

    peer_slices: int = 1 << 20
    """Slices (boxes of tensors) that the open downloads of a peer, all of its ranks together, ask for. The server holds
    some hundred bytes of each."""

    peer_waiting_calls: int = 16
    """Calls of a peer that wait at a time, for a round or for the place of another process. Clients need one."""

    health_watches: int = 64
    """Calls that watch the server's health (Watch of gRPC's health service) at a time; an address has a quarter."""

    silent_calls: int = 256
    """Calls that have not brought a message yet, altogether; an address has a quarter. Where there are more, those that
    have been silent for longest end."""

    silent_seconds: float = 30.0
    """How long a call may be without having brought a message."""

    keep_snapshots: int = 2
    """How many committed rounds stay on the disk."""

    runs: Mapping[str, RunConfig] = field(default_factory=dict)
    """The runs by their name, the run id that peers give."""

    def check(self) -> None:
        """Check everything.

        Raises:
            UserError: something is wrong; names every problem.
        """
        found = self.problems()
        if found:
            raise combine(found, "server configuration")

    def problems(self) -> list[str]:
        """Return the problems of the values, one sentence each."""
        found = []
        if not self.dir or "\0" in self.dir:
            found.append(f"dir is {self.dir!r}; name the folder in which the server should keep its state")
        address = split_address(self.bind, any_port=True)
        if address is None:
            found.append(f"bind is {self.bind!r}; give ADDRESS:PORT, such as 127.0.0.1:50051")
        elif not is_loopback(address[0]) and not self.insecure and not self._knows_its_callers:
            found.append(
                f"bind is {self.bind}, which others reach, so that tls_cert, tls_key, and token_file or tls_client_ca "
                "are needed; give them, listen at 127.0.0.1, or say insecure (--insecure)"
            )
        if self.state is not None and "://" not in self.state:
            found.append(f"state is {self.state!r}; give a URL such as s3://bucket/folder (the folder here is dir)")
        elif self.state is not None and self.state.startswith("memory:"):
            found.append(f"state is {self.state!r}, which is gone with this process; give a URL of storage that stays")
        if (self.tls_cert is None) != (self.tls_key is None):
            found.append("tls_cert and tls_key belong together; give both or none")
        if self.tls_client_ca is not None and self.tls_cert is None:
            found.append("tls_client_ca has no meaning without tls_cert and tls_key")
        if self.operators and self.tls_client_ca is None:
            found.append("operators are names of certificates, which callers show with tls_client_ca alone; add that")
        if self.status_port is not None and not 0 <= self.status_port <= 65535:
            found.append(f"status_port is {self.status_port}; it must be 0 to 65535")
        if not self.status_host.strip():
            found.append(f"status_host is {self.status_host!r}, which means every address; give one, or drop it")
        elif self.status_port is None and not is_loopback(self.status_host):
            found.append(f"status_host is {self.status_host!r}, and there is no status_port; add it, or drop this one")
        elif self.status_port is not None and not is_loopback(self.status_host) and not self.insecure:
            found.append(
                f"status_host is {self.status_host}, which others reach, and the page has neither TLS nor a token; let "
                "a proxy with both lead to 127.0.0.1, or say insecure (--insecure)"
            )
        found += self._shard_problems()
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                found.append(f"{name} is {getattr(self, name)}; it must be {least} or more")
        if self.stream_window > _LARGEST_WINDOW:
            found.append(f"stream_window is {self.stream_window}; it must be {_LARGEST_WINDOW} or less")
        for name in ("silent_seconds", "idle_seconds"):
            if not can_be_waited(getattr(self, name)):
                found.append(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.keep_snapshots < 1:
            found.append(f"keep_snapshots is {self.keep_snapshots}; it must be 1 or more")
        if not self.runs:
            found.append("there is no run; name at least one under runs (--run NAME --peers N)")
        for name, run in self.runs.items():
            if not NAME.fullmatch(name):
                found.append(f"{name!r} cannot be the name of a run; use letters, digits, '.', '_' and '-'")
            found += [f"run {name}: {problem}" for problem in run.problems()]
        return found

    @property
    def folder(self) -> Path:
        """Where this server keeps its state: shards may share a disk."""
        return Path(self.dir) if self.shard == 0 else Path(self.dir) / f"shard-{self.shard}"

    @property
    def _knows_its_callers(self) -> bool:
        """Whether calls are encrypted, and come with the token or a certificate."""
        return self.tls_cert is not None and (self.token_file is not None or self.tls_client_ca is not None)

    def _shard_problems(self) -> list[str]:
        found = []
        if not self.shards:
            found += [f"shard is {self.shard}, and there are no shards; list their addresses"] * (self.shard != 0)
            for name in ("tls_ca", "shard_secret_file"):
                if getattr(self, name) is not None:
                    found.append(f"{name} is for the calls of shards, and there are none; drop it")
            return found
        for address in self.shards:
            if split_address(str(address)) is None:
                found.append(f"shards: {address!r} is not an address; give ADDRESS:PORT of every one")
        if len(self.shards) < 2 or len(set(self.shards)) < len(self.shards):
            found.append(f"shards are {', '.join(map(str, self.shards))}; give 2 or more, each once, or drop shards")
        if not 0 <= self.shard < len(self.shards):
            found.append(f"shard is {self.shard}; it must be 0 to {len(self.shards) - 1}")
        if self.tls_cert is not None and self.tls_ca is None:
            found.append("shards with tls_cert need tls_ca, by which the first one knows the others; add it")
        if self.shard_secret_file is None and (self.token_file is not None or self.tls_client_ca is not None):
            found.append(
                "shards with token_file or tls_client_ca need shard_secret_file, by which the others know the first "
                "one, since peers show the token or a certificate too; give all servers the same file, and no peer"
            )
        return found


def read_config(path: Path) -> dict[str, Any]:
    """Return the fields of `ServerConfig` that a YAML file gives, paths of token and certificates relative to the file.

    Raises:
        UserError: the file cannot be read, or a field is unknown or of the wrong type.
    """
    given = _checked(read_yaml(path), ServerConfig, str(path))
    shards = given.get("shards", [])
    if not isinstance(shards, list) or not all(isinstance(address, str) for address in shards):
        raise UserError(
            f"{path}: shards is {shards!r}; it must be a list of addresses, such as [host0:50051, host1:50051], "
            "without a blank after the colon"
        )
    operators = given.get("operators", [])
    if not isinstance(operators, list) or not all(isinstance(name, str) for name in operators):
        raise UserError(f"{path}: operators is {operators!r}; it must be a list of names of certificates")
    for name in ("token_file", "tls_cert", "tls_key", "tls_client_ca", "tls_ca", "shard_secret_file"):
        if given.get(name) == "":
            raise UserError(f"{path}: {name} is empty; name the file, or drop {name}")
        if given.get(name) is not None:
            given[name] = str(path.parent / given[name])
    runs = given.get("runs", {})
    if not isinstance(runs, dict):
        raise UserError(f"{path}: runs must be a mapping from names to runs")
    for name in runs:
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise UserError(f"{path}: {name!r} cannot be the name of a run; put it in quotes if it is meant")
    if len({str(name) for name in runs}) < len(runs):
        raise UserError(f"{path}: runs has names that are the same as text, {', '.join(map(repr, runs))}; change one")
    given["runs"] = {str(name): run_config(run, f"{path}: run {name}") for name, run in runs.items()}
    return given


def run_config(content: Any, where: str) -> RunConfig:
    """Return the run that a mapping describes.

    Raises:
        UserError: a field is missing, unknown or of the wrong type.
    """
    given = _checked(content, RunConfig, where)
    if "peers" not in given:
        raise UserError(f"{where}: peers is missing; say how many peers meet")
    return RunConfig(**given)


_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


def _checked(content: Any, config: type, where: str) -> dict[str, Any]:
    """Return a mapping whose keys are fields of a config, with values of their types."""
    if not isinstance(content, dict):
        raise UserError(f"{where}: must be a mapping of fields to values")
    known = {entry.name: str(entry.type) for entry in fields(config)}
    for name, value in content.items():
        if name not in known:
            raise UserError(f"{where}: field {name!r} is unknown; the fields are {', '.join(known)}")
        allowed = known[name].split(" | ")
        if (value is None and "None" in allowed) or allowed[0] not in _TYPES:
            continue
        if not isinstance(value, _TYPES[allowed[0]]) or (isinstance(value, bool) and allowed[0] != "bool"):
            raise UserError(f"{where}: {name} is {value!r}; it must be of type {allowed[0]}")
    return dict(content)
