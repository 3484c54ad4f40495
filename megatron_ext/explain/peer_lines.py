# SPDX-License-Identifier: Apache-2.0
"""A peer of the sync service, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_ext.explain.units import gigabytes, ranges

__all__ = ["lines_of"]

_LISTED_PEERS = 8


def lines_of(facts: dict[str, Any], *, step_tokens: int) -> Iterator[str]:
    """Yield what a peer is and what it moves.

    Args:
        facts: of `PeerOfRank.facts`.
        step_tokens: of an inner step of the whole peer.
    """
    interval, seconds = facts["interval"], facts["interval_seconds"]
    every = f"{interval} steps" if seconds is None else f"{seconds:g} s"
    place = "" if facts["index"] is None else f" (part {facts['index']} of the samples)"
    yield (
        f"peer {facts['peer']}{place} of {facts['peers']} in run {facts['run']} at {facts['server']}: a round every "
        f"{every}, values travel as {facts['codec']}"
    )
    owners = facts["experts_of_peers"]
    if owners is not None:
        shown = [f"peer {peer}: {ranges(experts)}" for peer, experts in enumerate(owners)]
        more = f"; and {len(shown) - _LISTED_PEERS} more" if len(shown) > _LISTED_PEERS else ""
        yield f"experts that peers own: {'; '.join(shown[:_LISTED_PEERS])}{more}"
    up, down = facts["bytes_up"], facts["bytes_down"]
    line = f"this peer sends {gigabytes(up)} to the server per round, and takes at least {gigabytes(down)} from it"
    if interval is not None:
        line += f": {gigabytes((up + down) / (interval * step_tokens))} per token"
    yield line
