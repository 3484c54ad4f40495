# SPDX-License-Identifier: Apache-2.0
"""A rank that is gone is told of by all others in one line, not by a stack of each."""

from __future__ import annotations

import errno
import os

import torch.distributed as dist

from megatron_ext.errors import UserError

__all__ = ["lost_rank"]

_SAID_BY_GLOO = ("Connection closed by peer", *map(os.strerror, (errno.ECONNRESET, errno.EPIPE)))
_SAID_BY_NCCL = "remote process exited"


def lost_rank(error: BaseException) -> UserError | None:
    """Return what to tell instead of an error that says no more than that another rank is gone; None of another error.

    Args:
        error: raised by a collective, or by the store of the process group.
    """
    said = str(error)
    is_network = isinstance(error, dist.DistNetworkError)
    is_nccl = isinstance(error, dist.DistBackendError) and _SAID_BY_NCCL in said
    is_gloo = isinstance(error, RuntimeError) and "gloo" in said and any(words in said for words in _SAID_BY_GLOO)
    if not (is_network or is_nccl or is_gloo):
        return None
    return UserError(
        "a rank of this job has ended, or cannot be reached; what that rank wrote last says why. Start the job again "
        "with --load, from its newest checkpoint; torchrun --max-restarts N does so by itself where --load names the "
        "folder of --save"
    )
