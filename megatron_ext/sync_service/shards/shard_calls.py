# SPDX-License-Identifier: Apache-2.0
"""What the first of several servers asks of the others (`Shard` of the protocol), and what they answer.

`follow`: how the run stands. `seal`: make a contribution durable. `measure`, `common_squares` and `write`: make the
parts of a round. Each has one kind of request and one of answers; shard_messages.py makes messages of them, and checks
those that were received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.field_checks import Malformed
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.shards.shard import RoundJob
from megatron_ext.sync_service.values.decision import Decision

__all__ = ["LARGEST_INDEX", "Followed", "Identity", "Seal", "Sealed", "Setting", "Word", "Work", "check_work"]

type Setting = str | float | bool | None
"""The value of a field of a configuration."""

LARGEST_INDEX = 4095
"""Of a peer, see `RunConfig.peers`."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """How a run stands, as the first server says it."""

    shards: tuple[str, ...]
    """Addresses of all servers."""

    shard: int = 0
    """Which of them is told."""

    config: Mapping[str, Setting]
    """Of the run, at the first server."""

    id: str
    """What tells the run from others of its name; empty before it has begun."""

    open_round: int
    """The round that takes contributions."""

    members: Mapping[str, str]
    """Which process speaks for a peer."""

    kept: Mapping[str, int]
    """By peer, the round for which the contribution was made that counts, whichever process speaks for the peer by
    now."""

    used: Mapping[str, int]
    """By peer that has contributed, the round for which it did so last, where rounds are asynchronous."""

    last_round: int | None
    """After which the first server ends; None while there is no end."""

    catalog: Catalog | None = None
    """The shard's tensors, said once."""

    codec: str = "fp32"
    """In which contributions travel, said with them."""


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What a shard says to the word."""

    wants_catalog: bool
    """Whether it has to be told its tensors first."""

    spooled: dict[str, int]
    """Bytes of what it has of contributions, by peer."""

    codecs: dict[str, str]
    """By name, the package that the shard has a codec from; empty for megatron_ext."""


@dataclass(frozen=True, kw_only=True)
class Seal:
    """A contribution that is to be made durable."""

    peer: str
    """Whose."""

    instance: str
    """Which process has uploaded it."""

    index: int
    """The peer's."""

    round: int
    """For which it was made."""


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """What came of that."""

    missing: str | None
    """What it lacks; None when it is whole."""

    frames: int
    """That the shard has of it."""

    bytes: int
    """Likewise."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A part of the work on a round."""

    job: RoundJob
    """The round."""

    decision: Decision | None
    """Who counts in it, where that was decided."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """To which run, and which part of it, the values in a folder belong."""

    id: str
    """Of the run."""

    shard: int
    """Which part."""

    shards: int
    """How many there are."""


def check_work(call: str, work: Work, config: RunConfig, catalog: Catalog) -> Decision:
    """Check that a shard can do what it is asked for.

    Args:
        call: what.
        work: with what.
        config: of the run.
        catalog: the shard's tensors.

    Returns:
        What was decided; nothing where only measuring is asked for.

    Raises:
        Malformed: it contradicts itself, the configuration or the catalog.
    """
    job, decision = work.job, work.decision
    if decision is None:
        if call != "measure":
            raise Malformed(f"{call}.decision is missing")
        decision = Decision()
    indices = [uploader.index for uploader in job.uploaders]
    peers = {uploader.peer for uploader in job.uploaders}
    if len(set(indices)) < len(indices) or len(peers) < len(indices):
        raise Malformed(f"{call}.job.uploaders has a peer or an index twice")
    if max(indices, default=0) >= config.peers:
        raise Malformed(f"{call}.job.uploaders has index {max(indices)}; there are {config.peers} peers")
    is_alone = config.is_asynchronous and job.number > 0
    if is_alone and len(indices) != 1:
        raise Malformed(f"{call}.job.uploaders has {len(indices)}; asynchronous rounds are of one each")
    for uploader in job.uploaders:
        if uploader.made_for > job.number or (uploader.made_for != job.number and not is_alone):
            raise Malformed(f"{call}.job.uploaders has one made for round {uploader.made_for}, not {job.number}")
    if job.number == 0 and (len(peers) != 1 or decision.rejected):
        raise Malformed(f"{call}.job: the start is one peer's, which counts; {len(peers)} have uploaded")
    if decision.verdicts is not None:
        for spec in catalog:
            if spec.judged_as not in decision.verdicts:
                raise Malformed(f"{call}.decision.verdicts has nothing of {spec.judged_title}")
    return decision
