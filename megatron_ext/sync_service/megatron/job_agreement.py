# SPDX-License-Identifier: Apache-2.0
"""What the Megatron jobs of a run have to agree on beside their tensors."""

from __future__ import annotations

from typing import Any

from megatron_ext.options import asks_to_switch, shared_by_peers
from megatron_ext.sync_service.megatron.arguments import interval_of
from megatron_ext.sync_service.protocol.report import INTERVAL

__all__ = ["agreed"]


def agreed(args: Any) -> dict[str, str]:
    """Return what the peers have to agree on beside the tensors: interval, order of the samples, and the function.

    Which of Megatron's options are among it is in the table of options.

    Args:
        args: Megatron's arguments, checked.
    """
    # Parts of the one and of the other would have tokens in common.
    reads_documents = asks_to_switch(args)
    return {
        INTERVAL: interval_of(args),
        "data (--hot-switch-strategies reads documents, also with one strategy)": (
            "documents" if reads_documents else "samples of --seq-length tokens"
        ),
        **shared_by_peers(args),
    }
