# SPDX-License-Identifier: Apache-2.0
"""The former place of `megatron_ext.sync_service.peer.client`, for programs that import it from here."""

import warnings

from megatron_ext.sync_service.peer.client import *  # noqa: F403  # whatever that module calls public

warnings.warn(
    "megatron_ext.sync_service.client has moved; import from megatron_ext.sync_service.peer.client",
    FutureWarning,
    stacklevel=2,
)
