# SPDX-License-Identifier: Apache-2.0
"""Messages of what the first of several servers and the others say to each other, and what such messages say.

What was received is checked, and the field named that is not what it has to be. See shard_calls.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.outer.codecs.all_codecs import CODECS
from megatron_ext.outer.penalty import Verdict
from megatron_ext.sync_service.protocol.catalog import LONGEST_NAME, catalog_of, tensor_messages
from megatron_ext.sync_service.protocol.field_checks import Malformed, check_count, check_name, check_number, check_text
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.refusal import as_utf8
from megatron_ext.sync_service.shards.shard import RoundJob, Uploader
from megatron_ext.sync_service.shards.shard_calls import LARGEST_INDEX, Followed, Seal, Sealed, Setting, Word, Work
from megatron_ext.sync_service.values.decision import Decision, Measured
from megatron_ext.sync_service.values.guards import Judged
from megatron_ext.sync_service.values.reduction import DamagedContribution, Made

__all__ = [
    "damaged_message",
    "followed_message",
    "made_message",
    "measured_message",
    "read_common_squares",
    "read_damaged",
    "read_followed",
    "read_made",
    "read_measured",
    "read_seal",
    "read_sealed",
    "read_word",
    "read_work",
    "squares_message",
    "word_message",
    "work_message",
]

_LARGEST_SQUARE = 1e300
"""Far above what a contribution may have that is not refused; a million of them can be added up."""

_LEAST_OF_ALL = 1e-6
"""The largest weight is above it: that of the heaviest of `MOST_PEERS` peers."""

_LONGEST_ID = 64


# ---------------------------------------------------------------------------------------------------------------
# How the run stands
# ---------------------------------------------------------------------------------------------------------------


def word_message(word: Word) -> Any:
    """Return the message of how a run stands."""
    catalog = None
    if word.catalog is not None:
        catalog = pb2.PartOfCatalog(tensors=tensor_messages(word.catalog), codec=word.codec)
    return pb2.Word(
        shards=word.shards,
        shard=word.shard,
        config={field: _setting_message(value) for field, value in word.config.items()},
        id=word.id,
        open_round=word.open_round,
        members=word.members,
        kept=word.kept,
        used=word.used,
        last_round=word.last_round,
        catalog=catalog,
    )


def read_word(message: Any, where: str) -> Word:
    """Return how a run stands.

    Raises:
        Refusal: the message says something impossible.
    """
    word = Word(
        shards=tuple(message.shards),
        shard=message.shard,
        config={field: _setting(value) for field, value in message.config.items()},
        id=check_text(message.id, f"{where}.id", longest=_LONGEST_ID),
        open_round=check_count(message.open_round, f"{where}.open_round"),
        members=_names_by_name(message.members, f"{where}.members"),
        kept=_counts_by_name(message.kept, f"{where}.kept"),
        used=_counts_by_name(message.used, f"{where}.used"),
        last_round=_last_round(message, f"{where}.last_round"),
    )
    if not message.HasField("catalog"):
        return word
    codec = message.catalog.codec
    try:
        CODECS.find(codec)
    except UserError as error:
        raise Malformed(f"{where}.catalog.codec: {error}") from error
    return replace(word, catalog=catalog_of(message.catalog.tensors), codec=codec)


def followed_message(followed: Followed) -> Any:
    """Return the message of what a shard says to the word."""
    return pb2.Followed(**asdict(followed))


def read_followed(message: Any, where: str) -> Followed:
    """Return what a shard says to the word.

    Raises:
        Malformed: the message says something impossible.
    """
    return Followed(
        wants_catalog=message.wants_catalog,
        spooled=_counts_by_name(message.spooled, f"{where}.spooled"),
        codecs=dict(message.codecs),
    )


# ---------------------------------------------------------------------------------------------------------------
# A contribution
# ---------------------------------------------------------------------------------------------------------------


def read_seal(message: Any, where: str) -> Seal:
    """Return which contribution is to be made durable.

    Raises:
        Malformed: the message says something impossible.
    """
    return Seal(
        peer=check_name(message.peer, f"{where}.peer"),
        instance=check_name(message.instance, f"{where}.instance"),
        index=check_count(message.index, f"{where}.index", most=LARGEST_INDEX),
        round=check_count(message.round, f"{where}.round"),
    )


def read_sealed(message: Any, where: str) -> Sealed:
    """Return what came of making a contribution durable.

    Raises:
        Malformed: the message says something impossible.
    """
    return Sealed(
        missing=check_text(message.missing, f"{where}.missing") if message.HasField("missing") else None,
        frames=check_count(message.frames, f"{where}.frames"),
        bytes=check_count(message.bytes, f"{where}.bytes"),
    )


def damaged_message(damaged: DamagedContribution) -> Any:
    """Return the message of a contribution that cannot be read, and was removed."""
    return pb2.Damaged(peer=damaged.peer, problem=as_utf8(damaged.problem))


def read_damaged(message: Any, where: str) -> tuple[str, str]:
    """Return whose contribution was damaged, and what is wrong with it.

    Raises:
        Malformed: the message says something impossible.
    """
    return check_name(message.peer, f"{where}.damaged.peer"), check_text(message.problem, f"{where}.damaged.problem")


# ---------------------------------------------------------------------------------------------------------------
# A part of the work on a round
# ---------------------------------------------------------------------------------------------------------------


def work_message(job: RoundJob, decision: Decision | None) -> Any:
    """Return the message of work on a round; of a decision it has what values are made by."""
    return pb2.Work(job=_job_message(job), decision=None if decision is None else _decision_message(decision))


def read_work(message: Any, where: str) -> Work:
    """Return the work that is asked for.

    Raises:
        Malformed: the message says something impossible.
    """
    decision = _decision(message.decision, f"{where}.decision") if message.HasField("decision") else None
    return Work(job=_job(message.job, f"{where}.job"), decision=decision)


def measured_message(measured: Iterable[Measured]) -> Any:
    """Return the message of what is known of contributions."""
    return pb2.MeasuredContributions(
        contributions=[
            pb2.Measured(squares=_judged_messages(entry.squares), unusable=entry.unusable, nbytes=entry.nbytes)
            for entry in measured
        ]
    )


def read_measured(message: Any, where: str) -> list[Measured]:
    """Return what is known of contributions.

    Raises:
        Malformed: the message says something impossible.
    """
    found = []
    for place, entry in enumerate(message.contributions):
        field = f"{where}.contributions[{place}]"
        name = check_text(entry.unusable, f"{field}.unusable", longest=LONGEST_NAME)
        found.append(
            Measured(
                squares=_by_judged(entry.squares, f"{field}.squares", most=_LARGEST_SQUARE),
                unusable=name if entry.HasField("unusable") else None,
                nbytes=check_count(entry.nbytes, f"{field}.nbytes"),
            )
        )
    return found


def squares_message(squares: Mapping[Judged, float]) -> Any:
    """Return the message of squared norms of common pseudo-gradients."""
    return pb2.CommonSquares(squares=_judged_messages(squares))


def read_common_squares(message: Any, where: str) -> dict[Judged, float]:
    """Return squared norms of common pseudo-gradients.

    Raises:
        Malformed: the message says something impossible.
    """
    return _by_judged(message.squares, f"{where}.squares", most=_LARGEST_SQUARE)


def made_message(made: Made) -> Any:
    """Return the message of what came of a round, without how its values travel."""
    plain, placed = made.sums
    return pb2.Made(plain_sum=plain, placed_sum=placed, outer_scalars=made.outer_scalars)


def read_made(message: Any, where: str) -> Made:
    """Return what came of a round.

    Raises:
        Malformed: the message says something impossible.
    """
    scalars = _scalars(message.outer_scalars, f"{where}.outer_scalars")
    return Made(sums=(message.plain_sum, message.placed_sum), outer_scalars=scalars)


def _job_message(job: RoundJob) -> Any:
    return pb2.RoundJob(
        round=job.number,
        uploaders=[pb2.Uploader(**asdict(uploader)) for uploader in job.uploaders],
        outer_scalars=job.outer_scalars,
    )


def _job(message: Any, where: str) -> RoundJob:
    return RoundJob(
        number=check_count(message.round, f"{where}.round"),
        uploaders=tuple(
            _uploader(entry, f"{where}.uploaders[{place}]") for place, entry in enumerate(message.uploaders)
        ),
        outer_scalars=_scalars(message.outer_scalars, f"{where}.outer_scalars"),
    )


def _uploader(message: Any, where: str) -> Uploader:
    return Uploader(
        peer=check_name(message.peer, f"{where}.peer"),
        index=check_count(message.index, f"{where}.index", most=LARGEST_INDEX),
        made_for=check_count(message.made_for, f"{where}.made_for"),
    )


def _decision_message(decision: Decision) -> Any:
    verdicts = None
    if decision.verdicts is not None:
        verdicts = pb2.Verdicts(
            verdicts=[
                pb2.JudgedVerdict(
                    unit=unit,
                    is_owned=is_owned,
                    accepted=verdict.accepted,
                    weights=verdict.weights,
                    log_weights=verdict.log_weights,
                    norms=verdict.norms,
                )
                for (unit, is_owned), verdict in decision.verdicts.items()
            ]
        )
    coefficients = _judged_messages(decision.coefficients)
    return pb2.Decision(rejected=decision.rejected, verdicts=verdicts, coefficients=coefficients)


def _decision(message: Any, where: str) -> Decision:
    verdicts = None
    if message.HasField("verdicts"):
        verdicts = {
            _judged(entry, f"{where}.verdicts[{place}]"): _verdict(entry, f"{where}.verdicts[{place}]")
            for place, entry in enumerate(message.verdicts.verdicts)
        }
    key = f"a key of {where}.rejected"
    return Decision(
        rejected={check_name(peer, key): why for peer, why in message.rejected.items()},
        verdicts=verdicts,
        coefficients=_by_judged(message.coefficients, f"{where}.coefficients", most=LARGEST_INDEX + 1),
    )


def _verdict(message: Any, where: str) -> Verdict:
    accepted = tuple(check_count(index, f"{where}.accepted", most=LARGEST_INDEX) for index in message.accepted)
    if len(set(accepted)) < len(accepted):
        raise Malformed(f"{where}.accepted has an index twice")
    for field, may_be_empty in (("weights", False), ("log_weights", True), ("norms", True)):
        count = len(getattr(message, field))
        if count != len(accepted) and not (may_be_empty and count == 0):
            raise Malformed(f"{where}.{field} has {count} entries, and accepted {len(accepted)}")
    weights = tuple(check_number(weight, f"{where}.weights", least=0, most=1) for weight in message.weights)
    if max(weights, default=1.0) < _LEAST_OF_ALL:
        raise Malformed(f"{where}.weights are all nothing")
    return Verdict(
        accepted=accepted,
        weights=weights,
        log_weights=tuple(check_number(number, f"{where}.log_weights") for number in message.log_weights),
        norms=tuple(check_number(number, f"{where}.norms") for number in message.norms),
    )


# ---------------------------------------------------------------------------------------------------------------
# Fields of several messages
# ---------------------------------------------------------------------------------------------------------------


def _judged_messages(values: Mapping[Judged, float]) -> Sequence[Any]:
    return [pb2.JudgedNumber(unit=unit, is_owned=owned, value=value) for (unit, owned), value in values.items()]


def _by_judged(messages: Any, where: str, *, most: float) -> dict[Judged, float]:
    return {
        _judged(entry, f"{where}[{place}]"): check_number(entry.value, f"{where}[{place}]", least=0, most=most)
        for place, entry in enumerate(messages)
    }


def _judged(message: Any, where: str) -> Judged:
    return check_text(message.unit, f"{where}.unit", longest=LONGEST_NAME), message.is_owned


def _names_by_name(entries: Any, where: str) -> dict[str, str]:
    return {check_name(key, f"a key of {where}"): check_name(name, where) for key, name in entries.items()}


def _counts_by_name(entries: Any, where: str) -> dict[str, int]:
    return {check_name(key, f"a key of {where}"): check_count(count, where) for key, count in entries.items()}


def _scalars(entries: Any, where: str) -> dict[str, float]:
    """Return numbers by name, in the order of the names: that of a message's map may be any."""
    return {name: check_number(entries[name], f"{where}.{name[:60]!r}") for name in sorted(entries)}


def _last_round(message: Any, where: str) -> int | None:
    return check_count(message.last_round, where, least=-1) if message.HasField("last_round") else None


def _setting_message(value: Setting) -> Any:
    if value is None:
        return pb2.Setting()
    if isinstance(value, bool):
        return pb2.Setting(flag=value)
    return pb2.Setting(text=value) if isinstance(value, str) else pb2.Setting(number=value)


def _setting(message: Any) -> Setting:
    kind = message.WhichOneof("value")
    value: Setting = None if kind is None else getattr(message, kind)
    # As it is written in a configuration.
    return int(value) if isinstance(value, float) and value.is_integer() else value
