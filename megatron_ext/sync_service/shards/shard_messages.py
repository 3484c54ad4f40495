# SPDX-License-Identifier: Apache-2.0
"""What the first of several servers and the others say to each other of a round, as plain data that goes into JSON.

JSON keeps every bit of a float. What was received is checked: see schema.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_ext.outer.penalty import Verdict
from megatron_ext.sync_service.protocol.catalog import LONGEST_NAME
from megatron_ext.sync_service.protocol.schema import (
    Kind,
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
    text,
)
from megatron_ext.sync_service.shards.shard import RoundJob, Uploader
from megatron_ext.sync_service.values.decision import Decision, Measured
from megatron_ext.sync_service.values.guards import Judged
from megatron_ext.sync_service.values.reduction import Alone

__all__ = [
    "LARGEST_INDEX",
    "LARGEST_SQUARE",
    "by_judged",
    "by_judged_to_json",
    "decision_from_json",
    "decision_to_json",
    "job_from_json",
    "job_to_json",
    "measured_from_json",
    "measured_to_json",
]

Json = dict[str, Any]

LARGEST_INDEX = 4095
"""Of a peer, see `RunConfig.peers`."""

LARGEST_SQUARE = 1e300
"""Far above what a contribution may have that is not refused; a million of them can be added up."""

_LEAST_OF_ALL = 1e-6
"""The largest weight is above it: that of the heaviest of 4096 peers."""


def by_judged_to_json(values: Mapping[Judged, Any]) -> list[list[Any]]:
    """Return a mapping from what is judged as one."""
    return [[unit, is_owned, value] for (unit, is_owned), value in values.items()]


def by_judged[T](kind: Kind[T]) -> Kind[dict[Judged, T]]:
    """Return the kind of what `by_judged_to_json` returns, with one kind of values."""
    entries = list_of(row(text(LONGEST_NAME), flag, kind))

    def found(value: Any, where: str) -> dict[Judged, T]:
        return {(unit, is_owned): held for unit, is_owned, held in entries(value, where)}

    return found


def job_to_json(job: RoundJob) -> Json:
    """Return a round that is to be made."""
    uploaders = [asdict(uploader) for uploader in job.uploaders]
    alone = None if job.alone is None else asdict(job.alone)
    return {"round": job.number, "uploaders": uploaders, "outer_scalars": job.outer_scalars, "alone": alone}


def job_from_json(content: Any, where: str = "job") -> RoundJob:
    """Return what `job_to_json` was given.

    Raises:
        Malformed: it is something else.
    """
    return _JOB(content, where)


def measured_to_json(measured: Measured) -> Json:
    """Return what is known of a contribution."""
    return {
        "squares": by_judged_to_json(measured.squares),
        "broken": measured.unusable,
        "nbytes": measured.nbytes,
    }


def measured_from_json(content: Any, where: str = "measured") -> Measured:
    """Return what `measured_to_json` was given.

    Raises:
        Malformed: it is something else.
    """
    return _MEASURED(content, where)


def decision_to_json(decision: Decision) -> Json:
    """Return what values are made by; what is only told stays behind."""
    verdicts = None
    if decision.verdicts is not None:
        verdicts = by_judged_to_json({key: _verdict_to_json(verdict) for key, verdict in decision.verdicts.items()})
    return {
        "rejected": decision.rejected,
        "verdicts": verdicts,
        "coefficients": by_judged_to_json(decision.coefficients),
    }


def decision_from_json(content: Any, where: str = "decision") -> Decision:
    """Return what `decision_to_json` has of a decision.

    Raises:
        Malformed: it is something else.
    """
    return _DECISION(content, where)


def _verdict_to_json(verdict: Verdict) -> Json:
    fields = ("accepted", "weights", "log_weights", "norms")
    return {field: list(getattr(verdict, field)) for field in fields}


def _job(**fields: Any) -> RoundJob:
    return RoundJob(number=fields.pop("round"), **fields)


def _measured(**fields: Any) -> Measured:
    return Measured(unusable=fields.pop("broken"), **fields)


_indices = list_of(integer(0, LARGEST_INDEX), LARGEST_INDEX + 1)
_numbers = list_of(number(), LARGEST_INDEX + 1)
_verdict_fields = record(
    Verdict, accepted=_indices, weights=list_of(number(0, 1), LARGEST_INDEX + 1), log_weights=_numbers, norms=_numbers
)


def _verdict(value: Any, where: str) -> Verdict:
    found = _verdict_fields(value, where)
    if len(set(found.accepted)) < len(found.accepted):
        raise Malformed(f"{where}.accepted has an index twice")
    for field, may_be_empty in (("weights", False), ("log_weights", True), ("norms", True)):
        count = len(getattr(found, field))
        if count != len(found.accepted) and not (may_be_empty and count == 0):
            raise Malformed(f"{where}.{field} has {count} entries, and accepted {len(found.accepted)}")
    if max(found.weights, default=1.0) < _LEAST_OF_ALL:
        raise Malformed(f"{where}.weights are all nothing")
    return found


_JOB = record(
    _job,
    round=integer(),
    uploaders=list_of(
        record(Uploader, peer=name, index=integer(0, LARGEST_INDEX), made_for=integer()), LARGEST_INDEX + 1
    ),
    outer_scalars=map_of(text(LONGEST_NAME), number()),
    alone=optional(record(Alone, weight=number(0, LARGEST_INDEX + 1), per_step=integer(1))),
)
_MEASURED = record(
    _measured,
    may_lack=(),
    squares=by_judged(number(0, LARGEST_SQUARE)),
    **{"broken": optional(text(LONGEST_NAME))},  # its name in the messages, which shards of other releases read
    nbytes=integer(),
)
_DECISION = record(
    Decision,
    rejected=map_of(name, text()),
    verdicts=optional(by_judged(_verdict)),
    coefficients=by_judged(number(0, 1)),
)
