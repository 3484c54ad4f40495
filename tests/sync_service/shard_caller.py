# SPDX-License-Identifier: Apache-2.0
"""Somebody who talks to a shard as the first server does, or as one who pretends to be it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from megatron_ext.sync_service.channel.security import SECRET_KEY, TOKEN_KEY
from megatron_ext.sync_service.channel.tls import client_credentials
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.protocol import PROTOCOL_VERSION, grpc, pb2
from megatron_ext.sync_service.protocol.wire import METHODS
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.shards.shard_calls import Word
from megatron_ext.sync_service.shards.shard_messages import word_message
from tests.sync_service.authority import Authority


def word(addresses: Sequence[str], config: RunConfig, catalog: Catalog, /, **changes: Any) -> Any:
    """Return the message of how a run stands that begins, as the first server says it to shard 1."""
    fields = {
        "shards": tuple(addresses),
        "shard": 1,
        "config": asdict(config),
        "id": "one",
        "open_round": 0,
        "members": {},
        "kept": {},
        "used": {},
        "last_round": None,
        "codec": "fp32",
        "catalog": catalog,
    }
    return word_message(Word(**{**fields, **changes}))


def shard_request(call: str, content: Any, run: str = "demo") -> Any:
    """Return the request of a call, with a message or with its fields."""
    return pb2.ShardRequest(run=run, protocol=PROTOCOL_VERSION, **{call: content})


class ShardCaller:
    """Calls a server with whatever metadata."""

    def __init__(self, channel: Any, *, token: str | None = None, secret: str | None = None) -> None:
        self._channel = channel
        shown = {TOKEN_KEY: None if token is None else f"Bearer {token}", SECRET_KEY: secret}
        self._metadata = [(key, value) for key, value in shown.items() if value is not None]

    def ask(self, call: str, content: Any, run: str = "demo") -> tuple[Any, str]:
        """Call `Shard` with a message or its fields; see `send`."""
        return self.send("Shard", shard_request(call, content, run).SerializeToString())

    def send(self, method: str, *messages: bytes, seconds: float = 15.0) -> tuple[Any, str]:
        """Send bytes to a method; return the status and its words, or the answer."""
        path, where = METHODS + method, {"timeout": seconds, "metadata": self._metadata}
        try:
            if method == "Upload":
                answer = self._channel.stream_unary(path)(iter(messages), **where)
            elif method == "Download":
                answer = b"".join(self._channel.unary_stream(path)(messages[0], **where))
            else:
                answer = self._channel.unary_unary(path)(messages[0], **where)
        except grpc.RpcError as error:
            return error.code(), error.details() or ""
        return grpc.StatusCode.OK, answer.decode(errors="replace")


@contextmanager
def calling(address: str, shown: Mapping[str, str] | None = None) -> Iterator[ShardCaller]:
    """Yield who calls a server with a token and a secret, if any."""
    with grpc.insecure_channel(address) as channel:
        yield ShardCaller(channel, **(shown or {}))


@contextmanager
def shown(
    address: str, authority: Authority, files: dict[str, str], token: str | None = None, secret: str | None = None
) -> Iterator[ShardCaller]:
    """Yield who calls with a certificate."""
    credentials = client_credentials(authority.file, files.get("tls_cert"), files.get("tls_key"))
    with grpc.secure_channel(address, credentials) as channel:
        yield ShardCaller(channel, token=token, secret=secret)
