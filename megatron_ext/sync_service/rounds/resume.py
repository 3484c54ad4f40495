# SPDX-License-Identifier: Apache-2.0
"""Where a peer resumes: one rule, for every way in which its process may have ended and begun again.

The *ledger* is what the first server knows of the peer's part of the samples, the *claim* is what a process begins
with, from its checkpoint or from nothing. `decide` compares them, and nothing else decides: no sample counts twice, a
fault loses one interval at most, and an interval that an earlier process has contributed is made again without being
sent again, so that a peer that was killed around its upload changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_ext.sync_service.protocol.field_checks import LARGEST_COUNT
from megatron_ext.sync_service.protocol.report import Progress
from megatron_ext.sync_service.protocol.resuming import Adopt, Claim, Continue, Refuse, ResumeAnswer, Wait

__all__ = ["Ledger", "Recorded", "decide"]

_ROUNDING = 1e-9
"""Of schedules, which are floats: relative, and far below a step of any training."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A contribution of the peer whose round is open."""

    made_for: int
    """The round that it was made for: the one after that whose values it began with."""

    steps: int | None = None
    """Of its interval, if the peer has said so."""

    end: Progress | None = None
    """How far the training was when the interval ended, if the peer has said so."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What the first server knows of a peer, and of its part of the samples."""

    run: str
    """The run id."""

    newest: int
    """The newest committed round; -1 before the common start."""

    bases: Mapping[int, str]
    """Digests of the rounds that an interval may have begun with for its contribution to count: of the newest one
    where all make a round together, of those whose values are kept and not too old where rounds are asynchronous."""

    is_asynchronous: bool = False
    """Whether every contribution is a round of its own."""

    end: Progress | None = None
    """The end of the last committed range of its part, whoever made it; None where nothing of it is committed."""

    recorded: Recorded | None = None
    """The contribution whose round is open."""

    is_made_without: bool = False
    """Whether the open round takes no contributions any more, and has none of the peer."""

    used: int = -1
    """The round for which the last one was made that was judged, where rounds are asynchronous."""

    counted: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """The rounds in which contributions of the peer counted, with the titles of what they did not count in."""

    forgotten: int = -1
    """Up to which round others of them may have counted, which is not remembered any more."""


def decide(ledger: Ledger, claim: Claim) -> ResumeAnswer:
    """Return where a peer resumes.

    - Continue: the claim begins at or after the end of what is committed, with values from which a contribution still
      counts: the newest ones where all make a round together. It is not sent again where the recorded contribution
      has the claim's begin and end.
    - Wait: there is a recorded contribution, and it is another one, or cannot be made again exactly; or the open round
      is being made without the peer, whose interval would count in none.
    - Adopt: the claim is behind.
    - Refuse: the claim is ahead of the ledger or has other values in its round, or the ledger's place is in the middle
      of one of the claim's batches.
    """
    contradiction = _contradiction(ledger, claim)
    if contradiction and claim.whole:
        return Refuse(why=contradiction)
    if contradiction:
        # Weights of another history are no more than a start where the process is now.
        claim = replace(claim, round=0, digest="", begin=claim.now)
    if ledger.newest < 0:
        return Wait(round=0)
    if ledger.is_made_without:
        return Wait(round=ledger.newest + 1)
    is_behind = _is_behind(ledger, claim)
    if ledger.recorded is not None and (is_behind or not _is_made_again(ledger, claim, ledger.recorded)):
        return Wait(round=ledger.recorded.made_for)
    if claim.whole and not is_behind:
        return Continue(send=ledger.recorded is None, round=claim.round, digest=ledger.bases[claim.round])
    try:
        place = _in_batches(ledger.end or claim.begin, claim)
    except ValueError as error:
        return Refuse(why=str(error))
    if ledger.recorded is not None:
        return Continue(send=False, round=claim.round, digest=ledger.bases[claim.round], place=place)
    return Adopt(
        round=ledger.newest,
        digest=ledger.bases[ledger.newest],
        place=place,
        is_committed=ledger.end is not None,
        keeps_residuals=_kept_residuals(ledger, claim),
    )


def _contradiction(ledger: Ledger, claim: Claim) -> str:
    """Return why a claim cannot be of the ledger's history; empty where it can."""
    if claim.round > ledger.newest:
        last = ledger.newest if ledger.newest >= 0 else "none"
        return (
            f"this peer resumes from round {claim.round}, but the newest one of run {ledger.run!r} on the server is "
            f"{last}: the server has lost rounds, or is another one; restore its folder, or begin a run under another "
            "name"
        )
    digest = ledger.bases.get(claim.round, claim.digest)
    if claim.digest and claim.digest != digest:
        return (
            f"this peer resumes from values of round {claim.round} with the digest {claim.digest}, but those of run "
            f"{ledger.run!r} on the server have {digest}: the server's folder is an older copy, after which rounds "
            "were made again, or another run's; start this peer with --no-load-optim, which takes the server's values, "
            "or begin a run under another name"
        )
    return ""


def _is_behind(ledger: Ledger, claim: Claim) -> bool:
    """Return whether what a claim would contribute counts already, or would not count any more."""
    if claim.round not in ledger.bases or ledger.used > claim.round:
        return True
    # Another peer may have trained its part of the samples since.
    return ledger.end is not None and claim.begin is not None and claim.begin.samples < ledger.end.samples


def _is_made_again(ledger: Ledger, claim: Claim, recorded: Recorded) -> bool:
    """Return whether a claim leads to the contribution that is on record."""
    # Weights alone lead to that of a first interval, which has begun without moments too.
    if not claim.repeats or recorded.made_for != claim.round + 1 or not (claim.whole or claim.round == 0):
        return False
    if claim.begin is None or claim.steps is None or recorded.end is None:
        # A round of all peers has one contribution of each, so that its number is enough.
        return not ledger.is_asynchronous
    end = claim.begin.after(claim.steps)
    if claim.whole and claim.now is not None and claim.now.samples >= end.samples:
        return False  # the interval has become shorter than what there is of it
    # A whole claim has the schedule of its interval, which stands still in a step whose update Megatron skips.
    if not claim.whole and not math.isclose(recorded.end.schedule, end.schedule, rel_tol=_ROUNDING):
        return False
    return (recorded.steps, recorded.end) == (claim.steps, replace(end, schedule=recorded.end.schedule))


def _in_batches(place: Progress | None, claim: Claim) -> Progress | None:
    """Return a place with its iterations counted in the batches of a claim.

    Raises:
        ValueError: it is in the middle of one, or cannot be; says so in words for people.
    """
    if place is None or claim.now is None or not claim.now.batch:
        return place
    batch = claim.now.batch
    iteration, rest = divmod(place.iteration * (place.batch or batch), batch)
    if rest:
        raise ValueError(
            f"--global-batch-size {batch}: this peer's part of the samples is trained up to iteration "
            f"{place.iteration} of {place.batch} samples each, which is in the middle of a batch of {batch}; give "
            f"{place.batch}, or a size that divides {place.iteration * place.batch}"
        )
    if iteration > LARGEST_COUNT:
        raise ValueError(f"--global-batch-size {batch}: nobody has made {iteration} iterations; give {place.batch}")
    return replace(place, iteration=iteration, batch=batch)


def _kept_residuals(ledger: Ledger, claim: Claim) -> frozenset[str] | None:
    """Return the titles of what no contribution since a claim's round has counted in; None for everything."""
    if claim.round < ledger.forgotten:
        return frozenset()
    kept = None
    for number, excluded in ledger.counted.items():
        if number > claim.round:
            kept = excluded if kept is None else kept & excluded
    return kept
