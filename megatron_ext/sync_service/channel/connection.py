# SPDX-License-Identifier: Apache-2.0
"""A connection to a server that is tried again: every method of the protocol may be."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.address import is_loopback, split_address
from megatron_ext.sync_service.channel.line import Line, Stalled, Watch
from megatron_ext.sync_service.channel.proxy import proxy_variable
from megatron_ext.sync_service.channel.reminder import Reminder
from megatron_ext.sync_service.channel.security import SECRET_KEY, TOKEN_KEY, read_token
from megatron_ext.sync_service.channel.tls import client_credentials, what_tls_says
from megatron_ext.sync_service.protocol.durations import LONGEST_SECONDS, can_be_waited
from megatron_ext.sync_service.protocol.protocol import MAX_MESSAGE, grpc
from megatron_ext.sync_service.protocol.wire import Unreadable

if TYPE_CHECKING:
    from megatron_ext.sync_service.channel.streams import Streams

__all__ = ["Connection", "ConnectionConfig", "DamagedOnTheWay"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_DAMAGE_RETRIES = 5

_RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    # The server's disk is full: an operator can free space.
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    # What a dying server leaves of a call.
    grpc.StatusCode.CANCELLED,
)
_DAMAGED = (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNKNOWN)
"""No server of ours answers with the latter: a connection broke, as TLS breaks it at the first byte that is not what
was sent, or something else listens there."""


class DamagedOnTheWay(Exception):
    """What was received is not what was sent."""


@dataclass(frozen=True, kw_only=True)
class ConnectionConfig:
    """Where the server is and how to talk to it."""

    server: str
    """ADDRESS:PORT."""

    token_file: str | None = None
    """File with the server's token."""

    tls_ca: str | None = None
    """PEM file with the authority that has signed the server's certificate; switches TLS on."""

    tls_cert: str | None = None
    """PEM file with the caller's own certificate (mutual TLS)."""

    tls_key: str | None = None
    """PEM file with its key."""

    shard_secret_file: str | None = None
    """File with the secret by which the servers of a run know each other; for a server that calls another one."""

    insecure: bool = False
    """Talk to a server on another machine without TLS."""

    patience_seconds: float = 300.0
    """How long a call is tried again, from its first failure on, while the server is away or its disk is full."""

    call_seconds: float = 120.0
    """Deadline of one try of a call; of uploads and downloads, how long it may be silent, times the calls at it."""


class Connection:
    """Channels to a server, one after the other, with the token, and the way of calling again."""

    def __init__(self, config: ConnectionConfig) -> None:
        """Prepare; nothing is sent yet.

        Raises:
            UserError: a file cannot be read, or the server would be reached unencrypted.
        """
        self.config = config
        address = split_address(config.server)
        if address is None:
            raise UserError(f"server is {config.server!r}; give ADDRESS:PORT")
        self._host = address[0]
        for name, or_zero in (("patience_seconds", True), ("call_seconds", False)):
            seconds, least = getattr(config, name), "0 or more" if or_zero else "above 0"
            if not can_be_waited(seconds, or_zero=or_zero):
                raise UserError(f"{name} is {seconds}; it must be {least} and at most {LONGEST_SECONDS:.0f} (a month)")
        if config.tls_ca is None and not is_loopback(address[0]) and not config.insecure:
            raise UserError(
                f"server {config.server} is on another machine, and without tls_ca everything is sent unencrypted; "
                "give tls_ca (--tls-ca FILE), or say insecure (--insecure)"
            )
        if (config.tls_cert is None) != (config.tls_key is None) or (config.tls_cert and config.tls_ca is None):
            raise UserError("tls_cert and tls_key belong together, and need tls_ca; give all three or only tls_ca")
        token = read_token(config.token_file)
        secret = read_token(config.shard_secret_file, "shard_secret_file")
        shown = ((TOKEN_KEY, None if token is None else f"Bearer {token}"), (SECRET_KEY, secret))
        self._metadata = tuple((key, value) for key, value in shown if value is not None)
        self._lock = threading.Lock()
        self._abandoned = threading.Event()
        self._has_answered = False
        self._is_away = False
        self._reminder = Reminder()
        self._sent = self._received = 0
        self._line: Line | None = None
        self._given_up: list[Line] = []

    def check_files(self) -> None:
        """Read the certificates, as the first call would.

        Raises:
            UserError: a file cannot be used; names its field.
        """
        config = self.config
        if config.tls_ca is not None:
            client_credentials(config.tls_ca, config.tls_cert, config.tls_key)

    def close(self) -> None:
        """Close all channels; the next call opens another one.

        A process without an open channel can be forked, as data loaders and writers of checkpoints do.
        """
        with self._lock:
            for line in (self._line, *self._given_up):
                if line is not None:
                    line.close()
            self._line, self._given_up = None, []

    def abandon(self) -> None:
        """End all calls, those of other threads too, and let there be no further one."""
        self._abandoned.set()
        self.close()

    def call(self, method: str, request: Any, *, seconds: float | None = None) -> Any:
        """Return the answer to a call.

        Args:
            method: its name in the protocol.
            request: the message, or a function that makes a new iterator of messages for every try.
            seconds: deadline of one try instead of the configured one.

        Raises:
            UserError: the server refuses, or is away for longer than the patience.
        """

        def once() -> Any:
            line = self._open_line()
            sent = request() if callable(request) else request
            with line.one_more():
                answer = line.start(method, sent, timeout=seconds or self.config.call_seconds, metadata=self._metadata)
            line.progressed()
            return answer

        return self.again(method, once)

    def begin(self, method: str, request: Any) -> Any:
        """Return one try of a call whose answer is a stream, to be iterated over or cancelled; it has no deadline.

        Raises:
            UserError: the connection was closed.
        """
        try:
            return self._open_line().start(method, request, metadata=self._metadata)
        except Stalled as error:
            raise UserError(f"server {self.config.server}: {method} was given up: {error}") from error

    def stream(self, method: str, request: Any, streams: Streams) -> Iterator[Any]:
        """Yield the messages of one try of a call, which may take as long as it likes while messages come."""
        line = self._open_line()
        with line.one_more():
            call = line.start(method, request, metadata=self._metadata)
            with Watch(line, call, self.config.call_seconds, "come"), streams.held(call):
                for message in call:
                    line.progressed()
                    if isinstance(message, Unreadable):
                        raise DamagedOnTheWay(message.problem)
                    yield message
                    line.progressed()  # what the caller took to work on it does not count

    def send(self, method: str, messages: Iterator[Any], streams: Streams) -> Any:
        """Return the answer to one try of a call that sends messages, as long as it takes while they are taken."""
        line = self._open_line()

        def watched() -> Iterator[Any]:
            for message in messages:
                line.progressed()
                yield message  # it is asked for the next one when there is room for it in flight
            line.progressed()

        with line.one_more():
            call = line.start(method, watched(), future=True, metadata=self._metadata)
            with Watch(line, call, self.config.call_seconds, "been taken"), streams.held(call):
                return call.result()

    def count(self, *, sent: int = 0, received: int = 0) -> None:
        """Add to the bytes of values that went through this connection; what is sent again counts again."""
        with self._lock:
            self._sent += sent
            self._received += received

    def take_traffic(self) -> tuple[int, int]:
        """Return the bytes that were sent and received since this was asked the last time."""
        with self._lock:
            traffic = self._sent, self._received
            self._sent = self._received = 0
        return traffic

    def again(
        self,
        what: str,
        once: Callable[[], _T],
        advanced: Callable[[], bool] = lambda: False,
        streams: Streams | None = None,
    ) -> _T:
        """Return what a function returns, calling it again while the server is away.

        gRPC's own retry policy cannot do that: it tries 5 times at most, under one deadline, which is far less than the
        outage that patience covers; it repeats no stream of which something has arrived, nor an upload of more than its
        buffer holds; and it stays on a channel that is up while the calls on it get no answer.

        Args:
            what: the name of the call.
            once: makes it.
            advanced: says whether calls since it was last asked have brought something for good: then patience starts
                again.
            streams: it is one of these.

        Raises:
            UserError: the server refuses, is away for longer than the patience, or another stream has failed.
        """
        since: float | None = None  # the first failure: only then is the server known to be away
        pause, damaged = _FIRST_PAUSE, 0
        while True:
            if streams is not None and streams.is_ended:
                raise UserError(f"server {self.config.server}: {what} was given up, because another stream has failed")
            line, begin = self._open_line(), time.monotonic()
            try:
                found = once()
                self._has_answered, self._is_away = True, False
                return found
            except Stalled as error:
                code, text, is_damage = grpc.StatusCode.DEADLINE_EXCEEDED, str(error), False
                problem: Exception = error
            except grpc.RpcError as error:
                code, text = error.code(), error.details() or ""
                is_damage = code in _DAMAGED
                if code == grpc.StatusCode.UNKNOWN and self._has_answered:
                    code, is_damage = grpc.StatusCode.UNAVAILABLE, False
                problem = error
            except DamagedOnTheWay as error:
                code, text, is_damage = grpc.StatusCode.DATA_LOSS, str(error), True
                problem = error
            if streams is not None and streams.is_ended:
                continue
            if code == grpc.StatusCode.DEADLINE_EXCEEDED:
                self._give_up(line, max(begin, time.monotonic() - self.config.call_seconds))
            if advanced() or since is None:
                since = time.monotonic()
                pause, damaged = _FIRST_PAUSE, 0
            damaged += is_damage
            if code == grpc.StatusCode.UNIMPLEMENTED:
                raise UserError(
                    f"server {self.config.server} does not know {what} ({text}): something else listens there, or a "
                    "sync server of another version; see that the address is what `megatron-ext server start` prints"
                ) from problem
            if code not in _RETRIED and not (is_damage and damaged <= _DAMAGE_RETRIES):
                raise UserError(f"server {self.config.server} refuses {what}: {text}") from problem
            wrong = what_tls_says(text)
            if wrong is not None and not self._has_answered:
                # Waiting helps only where it has worked before.
                raise UserError(f"server {self.config.server}: {wrong}") from problem
            away = time.monotonic() - since
            left = self.config.patience_seconds - away
            if left <= 0:
                raise UserError(
                    f"server {self.config.server} has not answered {what} for {away:.0f} s "
                    f"({code.name}: {text}); {wrong or self._advice(code)}, then start again"
                ) from problem
            # Once for all streams that meet the same outage, and later that it lasts, for another reason perhaps.
            with self._lock:
                is_new, self._is_away = not self._is_away, True
                if is_new:
                    self._reminder = Reminder()
                is_due = self._reminder.is_due(away)
            if is_new:
                log.warning("%s: %s (%s); trying again", what, code.name, text)
            elif is_due:
                log.warning("%s: %s (%s); trying for %.0f s by now", what, code.name, text, away)
            # Peers that lost the server at the same moment must not come back at the same moment.
            self._abandoned.wait(min(pause * random.uniform(0.5, 1.0), left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _advice(self, code: Any) -> str:
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return "fix that on its machine"
        tls = ""
        if self.config.tls_ca is None:
            tls = ", that it has no TLS (else give tls_ca)"
        elif self.config.tls_cert is None:
            tls = ", that it asks for no certificate (else give tls_cert and tls_key)"
        else:
            tls = ", that its tls_client_ca has signed tls_cert"
        proxy = None if is_loopback(self._host) else proxy_variable(self._host)
        way = "nothing is in the way"
        if proxy is not None:
            way = f"the proxy of the environment variable {proxy} leads there (else add {self._host} to no_proxy)"
        return f"see that it runs there{tls}, and that {way}"

    def _open_line(self) -> Line:
        with self._lock:
            if self._abandoned.is_set():
                raise UserError(f"server {self.config.server}: the call was given up, because this job ends")
            if self._line is None:
                self._line = Line(self._open())
            return self._line

    def _give_up(self, line: Line, since: float) -> None:
        """Let further calls go through another channel, if this one has been silent for some time.

        Something in between may accept messages that no server will ever answer: then the channel itself never fails.
        """
        with self._lock:
            if self._line is not line or line.last >= since:
                return
            self._line = None
            self._given_up = [other for other in (*self._given_up, line) if not other.is_closed]
        line.give_up()

    def _open(self) -> Any:
        config = self.config
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            ("grpc.max_send_message_length", MAX_MESSAGE),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
            # In spite of its name, how long an attempt to connect may take: a far-away or busy server needs its time.
            ("grpc.min_reconnect_backoff_ms", 20_000),
            ("grpc.keepalive_time_ms", 15_000),
            # In a long interval it is closed here, before the server does that and gRPC says so on stderr. The next
            # call opens it again.
            ("grpc.client_idle_timeout_ms", 10_000),
            # Connections of other channels of this process are none of ours.
            ("grpc.use_local_subchannel_pool", 1),
            # No proxy leads back to this machine.
            ("grpc.enable_http_proxy", int(not is_loopback(self._host))),
        ]
        if config.tls_ca is None:
            return grpc.insecure_channel(config.server, options)
        credentials = client_credentials(config.tls_ca, config.tls_cert, config.tls_key)
        return grpc.secure_channel(config.server, credentials, options)
