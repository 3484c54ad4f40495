# SPDX-License-Identifier: Apache-2.0
"""The server process: its folder, its port, its runs, its end."""

from __future__ import annotations

import ctypes
import logging
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.sync_service.callers.origin import Operators
from megatron_ext.sync_service.channel.connection import ConnectionConfig
from megatron_ext.sync_service.channel.security import TokenCheck, read_token
from megatron_ext.sync_service.channel.tls import server_credentials, validity_problem
from megatron_ext.sync_service.protocol.names import path_component
from megatron_ext.sync_service.rounds.folder_lock import locked
from megatron_ext.sync_service.server.calls import Calls
from megatron_ext.sync_service.server.config import ServerConfig
from megatron_ext.sync_service.server.descriptors import room_for_connections
from megatron_ext.sync_service.server.grpc_health import HealthService
from megatron_ext.sync_service.server.listener import Listener
from megatron_ext.sync_service.server.run import Run
from megatron_ext.sync_service.server.servicer import Servicer
from megatron_ext.sync_service.server.shard_run import ShardRun
from megatron_ext.sync_service.server.shard_secret import ShardSecret
from megatron_ext.sync_service.server.shard_servicer import ShardServicer
from megatron_ext.sync_service.server.values_servicer import ValuesServicer
from megatron_ext.sync_service.shards.remote import RemoteState
from megatron_ext.sync_service.shards.remote_shard import PATIENCE_SECONDS
from megatron_ext.sync_service.status_page.http import StatusPage
from megatron_ext.sync_service.values.failpoints import Failpoints

__all__ = ["Server", "serve"]

log = logging.getLogger(__name__)

ADDRESS_FILE = "address"
"""In the server's folder: where it listens, for tools and scripts."""

_STOP_SECONDS = 2.0
_POLL_SECONDS = 0.2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Of glibc's malloc.h."""


class Server:
    """A server that listens. Its runs resume from its folder."""

    def __init__(self, config: ServerConfig, failpoints: Failpoints | None = None) -> None:
        """Open the runs and listen.

        Args:
            config: checked here.
            failpoints: where to die in tests.

        Raises:
            UserError: the configuration, the folder or the port cannot be used.
        """
        config.check()
        self._ended = threading.Event()
        self._draining = False
        self._failed: dict[str, BaseException] = {}
        self._health = HealthService(config.runs, config.health_watches)
        self._config = config
        self._token = TokenCheck(read_token(config.token_file))
        self._shard_secret = ShardSecret(config)
        folder = config.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"dir {folder}: cannot be made: {error.strerror}") from error
        self._failpoints = failpoints or Failpoints()
        self._runs: dict[str, Run] = {}
        self._shard_runs: dict[str, ShardRun] = {}
        # First the steps that may fail without touching other servers: an open run has taken its URL from its former
        # owner.
        self._listener, self.address = self._bind()
        self._status_page = None
        if config.status_port is not None and config.shard == 0:
            self._status_page = StatusPage(config.status_host, config.status_port, self._overview)
        try:
            self._open(folder)
        except BaseException as error:  # whatever it is, no thread keeps the process alive
            self._listener.stop(0.0)
            if self._status_page is not None:
                self._status_page.close()
            if isinstance(error, OSError):
                what = "it" if error.filename is None else error.filename
                raise UserError(f"dir {folder}: {what} cannot be used: {error.strerror}") from error
            raise

    def _open(self, folder: Path) -> None:
        """Resume the runs that are there, and let peers call."""
        self._open_runs(folder / "runs")
        config, operators = self._config, None
        if config.tls_client_ca is not None and config.tls_cert is not None:
            operators = Operators(config.tls_cert, config.operators)
        servicer: ValuesServicer = Servicer(self._runs, self._drain, operators)
        if self._shard_runs:
            first = self._config.shards[0]
            servicer = ShardServicer(self._shard_runs, self._config.shard, first, self._shard_secret)
        connections = self._listener.connections
        self._listener.start(lambda: Calls(servicer, self._health, config, self._token, connections))
        (folder / ADDRESS_FILE).write_text(self.address + "\n")

    def wait(self) -> None:
        """Serve until `stop` is called or the server is drained.

        Raises:
            RuntimeError: the rounds of a run could not continue; the others' continued as long as there were any.
        """
        while not self._ended.wait(_POLL_SECONDS):
            runs: list[Run | ShardRun] = [*self._runs.values(), *self._shard_runs.values()]
            # The first server tells the others.
            if (self._draining or self._shard_runs) and all(run.try_to_rest() for run in runs):
                log.info("drained")
                break
        self._health.end()
        if self._status_page is not None:
            self._status_page.close()
        self._listener.stop(_STOP_SECONDS)
        for run in self._runs.values():
            run.stop()
        for name, error in self._failed.items():
            raise RuntimeError(f"run {name} has stopped") from error

    @property
    def status_address(self) -> str | None:
        """Where the status page is; None when there is none."""
        return None if self._status_page is None else self._status_page.address

    def stop(self) -> None:
        """End soon. Nothing is lost: what counts is on the disk."""
        self._ended.set()

    def _open_runs(self, folder: Path) -> None:
        config = self._config
        for name in config.runs:
            path = folder / path_component(name, "run")
            if config.shard == 0:
                self._runs[name] = self._run(name, path)
            else:
                self._shard_runs[name] = ShardRun(name, config, path, self._failpoints)

    def _run(self, name: str, folder: Path) -> Run:
        config = self._config
        return Run(
            name,
            config.runs[name],
            folder,
            keep_snapshots=config.keep_snapshots,
            remote=None if config.state is None else RemoteState(config.state, name),
            shards=[self._to_shard(address) for address in config.shards],
            failpoints=self._failpoints,
            on_fatal=partial(self._fail, name),
        )

    def _to_shard(self, address: str) -> ConnectionConfig:
        config = self._config
        return ConnectionConfig(
            server=address,
            token_file=config.token_file,
            tls_ca=config.tls_ca,
            tls_cert=None if config.tls_client_ca is None else config.tls_cert,
            tls_key=None if config.tls_client_ca is None else config.tls_key,
            shard_secret_file=config.shard_secret_file,
            insecure=config.insecure,
            patience_seconds=PATIENCE_SECONDS,
        )

    def _overview(self) -> list[dict[str, Any]]:
        return [run.overview() for run in list(self._runs.values())]

    def _drain(self) -> None:
        self._draining = True

    def _fail(self, name: str, error: BaseException) -> None:
        """Continue for the other runs, if there are any: what ends one may be its own, such as an outer optimizer."""
        self._failed[name] = error
        self._health.stopped(name)
        if len(self._failed) == len(self._config.runs):
            self._ended.set()

    def _bind(self) -> tuple[Listener, str]:
        """Take the port, at which no call is answered before the server is started, and return its address as well."""
        config = self._config
        host, _, wanted = config.bind.rpartition(":")
        room = room_for_connections(config)
        _try_out(host, int(wanted))
        credentials = None
        if config.tls_cert is not None and config.tls_key is not None:
            credentials = server_credentials(config.tls_cert, config.tls_key, config.tls_client_ca)
            problem = validity_problem(config.tls_cert, config.tls_key)
            if problem is not None:
                log.warning("tls_cert %s: %s; no peer will trust this server", config.tls_cert, problem)
        listener = Listener(config.bind, credentials, room, config.idle_seconds, config.stream_window)
        return listener, f"{host}:{listener.port}"


def _try_out(host: str, port: int) -> None:
    """Listen at an address for a moment: gRPC says itself on stderr that it cannot, in lines of its own, and not why.

    Raises:
        UserError: the address is in use, or not this machine's.
    """
    problem: OSError | None = None
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        found, problem = [], error
    except UnicodeError:
        raise UserError(f"bind {host}:{port}: no machine can be called {host}; give a name or an address") from None
    for family, _, _, _, address in found:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                # As gRPC does: a port that a server has just left may be used.
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(address)
                trial.listen(1)
        except OSError as error:
            problem = problem or error
        else:
            return  # one of a name's addresses is enough: localhost may have one of IPv6 where there is none
    assert problem is not None
    raise UserError(
        f"bind {host}:{port}: cannot listen there: {problem.strerror}; stop who does, or give another port or address"
    ) from problem


def serve(config: ServerConfig, failpoints: Sequence[str] = ()) -> int:
    """Run a server until it is told to end.

    Args:
        config: of the server.
        failpoints: where to die in tests.

    Returns:
        The exit code.

    Raises:
        UserError: the configuration, the folder or the port cannot be used.
    """
    _share_freed_memory()
    with _locked(config.folder, config):
        server = Server(config, Failpoints(failpoints))

        def end(_signal: int, _frame: Any) -> None:
            server.stop()

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        page = "" if server.status_address is None else f", status page at {server.status_address}"
        which = "" if not config.shards else f", shard {config.shard} of {len(config.shards)}"
        print(f"megatron-ext server: listening at {server.address}, state in {config.folder}{which}{page}", flush=True)
        server.wait()
    return 0


def _share_freed_memory() -> None:
    """Let threads use what other threads have freed.

    glibc keeps what a thread frees for that thread and few others; with a thread for every stream that would add up.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 2)
        # Messages come and go: their memory stays, instead of being cleared by the kernel for every one of them.
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


@contextmanager
def _locked(folder: Path, config: ServerConfig) -> Iterator[None]:
    """Keep a second server away from the folder."""
    config.check()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"dir {folder}: cannot be used: {error.strerror}") from error
    with locked(folder):
        yield
