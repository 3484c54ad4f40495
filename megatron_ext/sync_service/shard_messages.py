# SPDX-License-Identifier: Apache-2.0
"""What the first of several servers and the others say to each other, as plain data that goes into JSON.

JSON keeps every bit of a float.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_ext.local_sgd.penalty import Verdict
from megatron_ext.sync_service.decision import Decision, Measured
from megatron_ext.sync_service.guards import Judged
from megatron_ext.sync_service.reduction import Alone
from megatron_ext.sync_service.shard import RoundJob, Uploader

__all__ = [
    "by_judged_from_json",
    "by_judged_to_json",
    "decision_from_json",
    "decision_to_json",
    "job_from_json",
    "job_to_json",
    "measured_from_json",
    "measured_to_json",
]

Json = dict[str, Any]


def by_judged_to_json(values: Mapping[Judged, Any]) -> list[list[Any]]:
    """Return a mapping from what is judged as one."""
    return [[unit, is_owned, value] for (unit, is_owned), value in values.items()]


def by_judged_from_json(entries: list[list[Any]]) -> dict[Judged, Any]:
    """Return what `by_judged_to_json` was given."""
    return {(unit, is_owned): value for unit, is_owned, value in entries}


def job_to_json(job: RoundJob) -> Json:
    """Return a round that is to be made."""
    uploaders = [asdict(uploader) for uploader in job.uploaders]
    alone = None if job.alone is None else asdict(job.alone)
    return {"round": job.number, "uploaders": uploaders, "outer_scalars": job.outer_scalars, "alone": alone}


def job_from_json(content: Json) -> RoundJob:
    """Return what `job_to_json` was given."""
    uploaders = tuple(Uploader(**entry) for entry in content["uploaders"])
    alone = None if content["alone"] is None else Alone(**content["alone"])
    return RoundJob(number=content["round"], uploaders=uploaders, outer_scalars=content["outer_scalars"], alone=alone)


def measured_to_json(measured: Measured) -> Json:
    """Return what is known of a contribution."""
    return {
        "squares": by_judged_to_json(measured.squares),
        "broken": measured.broken,
        "nbytes": measured.nbytes,
    }


def measured_from_json(content: Json) -> Measured:
    """Return what `measured_to_json` was given."""
    squares = by_judged_from_json(content["squares"])
    return Measured(squares=squares, broken=content["broken"], nbytes=content["nbytes"])


def decision_to_json(decision: Decision) -> Json:
    """Return what values are made by; what is only told stays behind."""
    verdicts = None
    if decision.verdicts is not None:
        verdicts = by_judged_to_json({key: asdict(verdict) for key, verdict in decision.verdicts.items()})
    return {
        "rejected": decision.rejected,
        "verdicts": verdicts,
        "coefficients": by_judged_to_json(decision.coefficients),
    }


def decision_from_json(content: Json) -> Decision:
    """Return what `decision_to_json` has of a decision."""
    verdicts = None
    if content["verdicts"] is not None:
        verdicts = {
            key: Verdict(
                accepted=tuple(entry["accepted"]),
                weights=tuple(entry["weights"]),
                log_weights=tuple(entry["log_weights"]),
                norms=tuple(entry["norms"]),
            )
            for key, entry in by_judged_from_json(content["verdicts"]).items()
        }
    coefficients = by_judged_from_json(content["coefficients"])
    return Decision(rejected=content["rejected"], verdicts=verdicts, coefficients=coefficients)
