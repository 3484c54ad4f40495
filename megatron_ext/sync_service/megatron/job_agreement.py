# SPDX-License-Identifier: Apache-2.0
"""What the Megatron jobs of a run have to agree on beside their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.options import asks_to_switch, shared_by_peers
from megatron_ext.sync_service.megatron.arguments import interval_of
from megatron_ext.sync_service.protocol.report import INTERVAL

__all__ = ["VOCABULARY", "agreed", "telling_padding"]

VOCABULARY = "vocabulary with its padding (--make-vocab-size-divisible-by)"
"""The field that jobs of different layouts differ in by Megatron's defaults: it pads to a multiple of 128 times TP."""


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


@contextmanager
def telling_padding(args: Any) -> Iterator[None]:
    """Say, where the server refuses this job for the rows of its vocabulary, which option makes them the run's.

    Raises:
        UserError: the server refuses, for whatever reason.
    """
    try:
        yield
    except UserError as error:
        field = re.escape(f"config field {VOCABULARY!r}")
        rows = re.search(rf"{field} is '\d+' at peer .+ and '(\d+)' in the run", str(error))
        if rows is None:
            raise
        tp = args.tensor_model_parallel_size
        multiple, rest = divmod(int(rows[1]), tp)
        if rest:
            way_out = f"TP {tp} cannot hold {rows[1]} rows in equal parts; choose another TP"
        else:
            way_out = f"with TP {tp}, --make-vocab-size-divisible-by {multiple} makes them {rows[1]}"
        raise UserError(f"{error} ({way_out})") from error
