# SPDX-License-Identifier: Apache-2.0
"""Where a peer resumes: what its process begins with, and the server's four answers, which `rounds/resume.py` gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.protocol.report import Progress

__all__ = ["KEPT_RESULTS", "Adopt", "Claim", "Continue", "Refuse", "ResumeAnswer", "Wait"]

KEPT_RESULTS = 16
"""How many rounds back a peer can ask what became of its contribution."""

_LONGEST_DIGEST = 64


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a process of a peer begins with."""

    round: int = 0
    """The round whose values its interval began with; the common start where it has none."""

    digest: str = ""
    """Of those values; empty where it is not known."""

    whole: bool = False
    """Whether the process has all of that interval's state, and not at most weights, which others replace."""

    repeats: bool = True
    """Whether it makes the interval exactly as an earlier process has, which takes a number of steps, not a time."""

    steps: int | None = None
    """How many the interval has, where that is known."""

    begin: Progress | None = None
    """How far the training was when the interval began, where it is counted."""

    now: Progress | None = None
    """How far it is, in batches of this process."""

    @classmethod
    def of(cls, message: Any) -> Claim:
        """Return what the protocol's message says.

        Raises:
            Refusal: no digest is like that, or no training can be so far.
        """
        if len(message.digest) > _LONGEST_DIGEST or not (message.digest.isalnum() or not message.digest):
            raise Refusal("invalid", f"claim.digest has {len(message.digest)} letters, which no digest of a round has")
        return cls(
            round=message.round,
            digest=message.digest,
            whole=message.whole,
            repeats=message.repeats,
            steps=message.steps if message.HasField("steps") else None,
            begin=Progress.of(message.begin) if message.HasField("begin") else None,
            now=Progress.of(message.now) if message.HasField("now") else None,
        )


@dataclass(frozen=True, kw_only=True)
class Continue:
    """The claim's interval resumes where it is, or is repeated from its beginning."""

    send: bool
    """Whether its contribution is to be sent: it is not where that of an earlier process is on record."""

    round: int
    """Whose values it begins with."""

    digest: str
    """Of those values."""

    place: Progress | None = None
    """How far the training is at the beginning of what is made again; None where a whole claim stays where it is."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What an earlier process has contributed is on record, and this one cannot repeat it: decide again later."""

    round: int
    """What it was made for."""


@dataclass(frozen=True, kw_only=True)
class Adopt:
    """The newest values replace the claim's, and the ledger's place does, if there is one."""

    round: int
    """The newest round."""

    digest: str
    """Of its values."""

    place: Progress | None
    """How far the training is then; None where neither the ledger nor the claim says so."""

    is_committed: bool
    """Whether that is the end of what is committed of the part. Nothing of it is otherwise, and the claim's interval
    is made from its beginning."""

    keeps_residuals: frozenset[str] | None
    """Titles of what keeps its residuals, because no contribution since the claim has counted in it; None for all."""


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """The claim contradicts the ledger."""

    why: str
    """Names what does not fit, and the way out."""


ResumeAnswer = Continue | Wait | Adopt | Refuse
"""Where a peer resumes."""
