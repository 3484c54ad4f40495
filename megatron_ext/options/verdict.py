# SPDX-License-Identifier: Apache-2.0
"""What a feature says about an option, and the words to say it with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

__all__ = [
    "CIRCUMSTANCES",
    "FEATURES",
    "OptionVerdict",
    "Status",
    "accepted",
    "clash",
    "like",
    "needs_gpu",
    "refused",
    "tested",
]

FEATURES = {
    "cpu": "on CPU",
    "local-sgd": "with local SGD",
    "hot-switch": "with hot switching",
    "sync-service": "with the sync service",
    "spes": "with SPES",
}
"""The features and backends that the table knows, and how a sentence speaks of them."""

CIRCUMSTANCES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "local-sgd": frozenset(
            {
                "--local-sgd-eager-updates",
                "--local-sgd-sync-in-forward",
                "--local-sgd-pseudo-grad-reducer pairwise",
                "--local-sgd-use-async",
            }
        ),
        "hot-switch": frozenset(f"--hot-switch-attention {way}" for way in ("documents", "rows", "padded")),
        "spes": frozenset({"frozen experts", "--spes-using-decayed-aux-loss"}),
    }
)
"""By feature, what of its own decides whether an option goes with it: an option of ours, or a kind of peer."""

Status = Literal["supported", "refused", "needs a GPU", "accepted", "like another"]


@dataclass(frozen=True, kw_only=True)
class OptionVerdict:
    """What becomes of a run with an option and a feature, and why."""

    status: Status
    """'supported': a test trains with it; 'refused', or 'needs a GPU': the run ends at its start; 'accepted': it runs,
    and no test is named for it; 'like another': another feature, which such a run has too, has the say."""

    tested_by: str = ""
    """The test that runs the option: `tests/...py::name`. Empty unless supported."""

    reason: str = ""
    """Why it is refused or accepted. Empty when supported."""

    way_out: str = ""
    """What to write instead. Empty unless refused."""

    named: str = ""
    """What the sentence calls the option, where several rows share it; empty for the row's own name."""

    names_itself: bool = False
    """Whether `reason` is a whole clause that names the options."""

    feature: str = ""
    """The feature that has the say: a key of `FEATURES`. Empty unless 'like another'."""

    exceptions: Mapping[str, OptionVerdict] = field(default_factory=lambda: MappingProxyType({}))
    """Other verdicts by the circumstance of the feature under which they hold."""

    def __post_init__(self) -> None:
        """Check that it says what its status calls for.

        Raises:
            ValueError: a verdict without its test, reason, way out or feature, or one that has them beside its status.
        """
        needed = {
            "supported": {"tested_by"},
            "refused": {"reason", "way_out"},
            "needs a GPU": {"reason", "way_out"},
            "accepted": {"reason"},
            "like another": {"feature"},
        }[self.status]
        given = {name for name in ("tested_by", "reason", "way_out", "feature") if getattr(self, name)}
        if given != needed:
            raise ValueError(f"table of options: {self.status!r} needs {sorted(needed)} and has {sorted(given)}")

    @property
    def refuses(self) -> bool:
        """Whether a run ends at its start."""
        return self.status in ("refused", "needs a GPU")

    def sentence(self, option: str, where: str, asked_by: str = "") -> str:
        """Return what a user reads who asked for an option that is refused.

        Args:
            option: the row's name.
            where: how sentences speak of the feature; empty where they do not.
            asked_by: put behind the option's name: what asks for it, where that is not the command line.
        """
        if self.names_itself:
            return f"{self.reason}; {self.way_out}"
        verb = "cannot work" if self.status == "needs a GPU" else "is not supported"
        there = f" {where}" if where else ""
        return f"{self.named or option}{asked_by} {verb}{there}: {self.reason}; {self.way_out}"

    def but(self, circumstance: str, verdict: OptionVerdict) -> OptionVerdict:
        """Return this verdict with another one under a circumstance of the feature.

        Args:
            circumstance: one of `CIRCUMSTANCES`.
            verdict: what holds then.
        """
        return replace(self, exceptions=MappingProxyType({**self.exceptions, circumstance: verdict}))


def tested(by: str) -> OptionVerdict:
    """Return the verdict on an option that the test `by`, `tests/...py::name`, runs."""
    return OptionVerdict(status="supported", tested_by=by)


def refused(reason: str, way_out: str = "drop it", *, named: str = "") -> OptionVerdict:
    """Return the verdict on an option that does not work for `reason`.

    Args:
        reason: why.
        way_out: what to write instead.
        named: what the sentence calls the option, where several rows share it.
    """
    return OptionVerdict(status="refused", reason=reason, way_out=way_out, named=named)


def needs_gpu(reason: str, way_out: str = "drop it") -> OptionVerdict:
    """Return the CPU backend's verdict on an option that cannot work there for `reason`."""
    return OptionVerdict(status="needs a GPU", reason=reason, way_out=way_out)


def clash(clause: str, way_out: str) -> OptionVerdict:
    """Return the verdict on an option that does not go with an option of ours.

    Args:
        clause: which does not go with which, and why.
        way_out: what to write instead.
    """
    return OptionVerdict(status="refused", reason=clause, way_out=way_out, names_itself=True)


def accepted(reason: str) -> OptionVerdict:
    """Return the verdict on an option that runs although no test is named for it.

    Args:
        reason: what is known.
    """
    return OptionVerdict(status="accepted", reason=reason)


def like(feature: str) -> OptionVerdict:
    """Return the verdict on an option about which another feature has the say, which such a run has too."""
    return OptionVerdict(status="like another", feature=feature)
