# SPDX-License-Identifier: Apache-2.0
"""gRPC and the generated code, in one place: whatever else of the package needs them imports them from here."""

from __future__ import annotations

from megatron_ext.errors import UserError
from megatron_ext.extras import pip_install_extra
from megatron_ext.sync_service.protocol.message_size import MAX_MESSAGE

try:
    import grpc
    from google.protobuf.message import DecodeError
    from google.protobuf.message_factory import GetMessageClass
    from grpc_health.v1 import health, health_pb2

    from megatron_ext.sync_service.protocol import sync_pb2 as pb2
except ImportError as problem:
    raise UserError(
        f"the sync service needs the packages grpcio, grpcio-health-checking and protobuf ({problem}); install them "
        f"with: {pip_install_extra('sync')}"
    ) from problem

__all__ = [
    "DIGEST_PROTOCOL",
    "MAX_MESSAGE",
    "PROTOCOL_VERSION",
    "DecodeError",
    "GetMessageClass",
    "grpc",
    "health",
    "health_pb2",
    "pb2",
]

PROTOCOL_VERSION = 6
"""Changes when client and server of different releases would misunderstand each other."""

DIGEST_PROTOCOL = 3
"""Since which one digests of values have the form that they have: runs that began with it are served."""
