# SPDX-License-Identifier: Apache-2.0
"""How large messages may be; apart, because a configuration is read where there is no gRPC."""

from __future__ import annotations

__all__ = ["MAX_MESSAGE"]

MAX_MESSAGE = 16 << 20
"""Bytes of the largest message in either direction."""
