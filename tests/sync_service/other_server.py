# SPDX-License-Identifier: Apache-2.0
"""A server of the protocol that answers as a test wants."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_ext.sync_service.protocol.protocol import grpc
from megatron_ext.sync_service.protocol.wire import METHODS


@dataclass(frozen=True)
class Refused:
    """An answer that is none."""

    code: Any
    """gRPC's status."""

    details: str
    """In words."""


@contextmanager
def serving(method: str, request: Any, answer: Callable[[Any], Any]) -> Iterator[str]:
    """Serve one unary method on this machine; yields the address.

    Args:
        method: its name.
        request: the class of its requests.
        answer: returns the reply to a request; called from several threads.
    """

    def handle(asked: Any, context: Any) -> Any:
        reply = answer(asked)
        if isinstance(reply, Refused):
            context.abort(reply.code, reply.details)
        return reply

    handler = grpc.unary_unary_rpc_method_handler(
        handle, request_deserializer=request.FromString, response_serializer=lambda reply: reply.SerializeToString()
    )
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(METHODS.strip("/"), {method: handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)
