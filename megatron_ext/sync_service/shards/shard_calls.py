# SPDX-License-Identifier: Apache-2.0
"""What the first of several servers asks of the others (`Shard` of the protocol), and what they answer.

`follow`: how the run stands. `seal`: make a contribution durable. `measure`, `common_squares` and `write`: make the
parts of a round. Each has one kind of request and one of answers, which the receiver checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.outer.codecs.all_codecs import CODECS
from megatron_ext.sync_service.protocol.catalog import LONGEST_NAME, MOST_AXES, Catalog, TensorSpec
from megatron_ext.sync_service.protocol.schema import (
    Malformed,
    flag,
    integer,
    list_of,
    map_of,
    name,
    number,
    optional,
    record,
    row,
    scalar,
    text,
)
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.shards.shard import RoundJob
from megatron_ext.sync_service.shards.shard_messages import (
    LARGEST_INDEX,
    LARGEST_SQUARE,
    by_judged,
    decision_from_json,
    job_from_json,
    measured_from_json,
)
from megatron_ext.sync_service.values.decision import Decision, Measured
from megatron_ext.sync_service.values.guards import Judged
from megatron_ext.sync_service.values.reduction import Made

__all__ = [
    "COMMON_SQUARES",
    "DAMAGED",
    "FOLLOWED",
    "IDENTITY_CONTENT",
    "MEASURED",
    "SEAL",
    "SEALED",
    "WORD",
    "WORK",
    "WRITTEN",
    "Damaged",
    "Followed",
    "Identity",
    "Seal",
    "Sealed",
    "Word",
    "Work",
    "check_work",
]


@dataclass(frozen=True, kw_only=True)
class Word:
    """How a run stands, as the first server says it."""

    shards: tuple[str, ...]
    """Addresses of all servers."""

    shard: int
    """Which of them is told."""

    config: Mapping[str, str | float | bool | None]
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

    used: Mapping[str, int | None]
    """By peer, the round for which it has contributed last, where rounds are asynchronous."""

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
class Damaged:
    """A contribution that cannot be read, and was removed."""

    peer: str
    """Whose."""

    problem: str
    """What is wrong with it."""


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
    if is_alone != (job.alone is not None):
        raise Malformed(f"{call}.job.alone is {'missing' if is_alone else 'given'}; rounds are {config.rounds}")
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


def _codec(value: Any, where: str) -> str:
    try:
        CODECS.find(str(value))
    except UserError as error:
        raise Malformed(f"{where}: {error}") from error
    return str(value)


def _catalog(value: Any, where: str) -> Catalog:
    return Catalog(_specs(value, where))


def _damaged(*, damaged: tuple[str, str]) -> Damaged:
    peer, problem = damaged
    return Damaged(peer=peer, problem=problem)


def _measured(*, measured: tuple[Measured, ...]) -> list[Measured]:
    return list(measured)


def _squares(*, squares: dict[Judged, float]) -> dict[Judged, float]:
    return squares


_specs = list_of(
    record(
        TensorSpec,
        name=text(LONGEST_NAME),
        shape=list_of(integer(1), MOST_AXES),
        unit=text(LONGEST_NAME),
        owners=list_of(integer(0, LARGEST_INDEX), LARGEST_INDEX + 1),
    )
)
_sum = integer(0, (1 << 32) - 1)
_LONGEST_ID = 64
_MOST_SHARDS = 4096

WORD = record(
    Word,
    may_lack=("catalog", "codec"),
    shards=list_of(text(LONGEST_NAME), _MOST_SHARDS),
    shard=integer(0, _MOST_SHARDS),
    config=map_of(text(LONGEST_NAME), scalar),
    id=text(_LONGEST_ID),
    open_round=integer(),
    members=map_of(name, name),
    kept=map_of(name, integer()),
    used=map_of(name, optional(integer())),
    last_round=optional(integer(-1)),
    catalog=_catalog,
    codec=_codec,
)
SEAL = record(Seal, peer=name, instance=name, index=integer(0, LARGEST_INDEX), round=integer())
WORK = record(Work, job=job_from_json, decision=optional(decision_from_json))

FOLLOWED = record(
    Followed, wants_catalog=flag, spooled=map_of(name, integer()), codecs=map_of(text(LONGEST_NAME), text(LONGEST_NAME))
)
SEALED = record(Sealed, missing=optional(text()), frames=integer(), bytes=integer())
DAMAGED = record(_damaged, damaged=row(name, text()))
MEASURED = record(_measured, measured=list_of(measured_from_json, LARGEST_INDEX + 1))
COMMON_SQUARES = record(_squares, squares=by_judged(number(0, LARGEST_SQUARE)))
WRITTEN = record(Made, sums=row(_sum, _sum), outer_scalars=map_of(text(LONGEST_NAME), number()))

IDENTITY_CONTENT = record(Identity, id=text(_LONGEST_ID), shard=integer(), shards=integer())
