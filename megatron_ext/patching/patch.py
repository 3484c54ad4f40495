# SPDX-License-Identifier: Apache-2.0
"""The record that describes one patch, and the error that a patch raises when it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_ext.errors import UserError

__all__ = ["MEGATRON_VERSIONS", "Patch", "PatchError", "PatchStatus", "SeamUnavailable"]

MEGATRON_VERSIONS = ">=0.18,<0.21"
"""The Megatron-core releases whose seams were read and run (docs/versions.md says what of each); others are refused."""


class PatchError(UserError):
    """A patch cannot be applied or undone.

    The message names the patch, its target, the versions it was written for, and the reason it exists, so
    that the reader can judge what the run would lose without it.
    """


class SeamUnavailable(PatchError):
    """The installed release is known not to have a patch's target. The message is one line for users of a feature."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One wrapper around one named attribute of another package.

    A patch never contains a copy of the attribute's code: `wrap` receives the original and returns what
    replaces it.
    """

    name: str
    """Unique name, `area/what`, shown by `megatron-ext patches`."""

    target: str
    """`module:attribute` or `module:Class.attribute`."""

    wrap: Callable[[Any], Any]
    """Maps the original attribute to its replacement. For a staticmethod or classmethod it receives the
    plain function underneath and the kind of method is kept."""

    reason: str
    """Why the patch exists, one sentence."""

    parameters: tuple[str, ...] = ()
    """Names of parameters that the target must have (its signature may have more)."""

    versions: str = MEGATRON_VERSIONS
    """Version specifier that `distribution` must satisfy; empty for any version."""

    distribution: str = "megatron-core"
    """The distribution that `versions` speaks of."""

    missing_from: str = ""
    """Version specifier of the releases that are known not to have the target, and so cannot do what needs the patch;
    in others its absence is an error. Whether a release has it is seen by looking, never by its number."""

    dispensable: bool = False
    """Whether a release that lacks the target, see `missing_from`, does nothing that the patch would change: what needs
    it elsewhere does without it there."""

    rebind: bool = True
    """Whether copies made by `from module import attribute` are replaced too. Off for values such as
    numbers or modules, whose identity says nothing about where they came from."""

    serves: tuple[Callable[..., Any], ...] = ()
    """Which events of `megatron_ext.hooks` it raises, and which methods of protocols it calls."""

    may_stay: bool = False
    """Whether the replacement does no harm when it cannot be undone, because someone else has replaced the target since
    and may call it."""

    def __post_init__(self) -> None:
        """Check the form of `target`.

        Raises:
            ValueError: `target` is not `module:attribute`.
        """
        module, separator, attribute = self.target.partition(":")
        if not (module and separator and attribute):
            raise ValueError(f"patch {self.name}: target {self.target!r} is not of the form module:attribute")

    @property
    def module(self) -> str:
        """The module part of the target."""
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        """The attribute part of the target, with the class in front where there is one."""
        return self.target.partition(":")[2]

    @property
    def takes_hook_point(self) -> bool:
        """Whether a fork that declares the target calls it through a hook point.

        Others bind one name in one module, where they are looked up at each call: nothing holds a copy of them.
        """
        return self.rebind or "." in self.attribute

    def describe(self) -> str:
        """Return the four things every error about this patch says."""
        wants = f"{self.distribution} {self.versions}" if self.versions else f"any {self.distribution}"
        parameters = ", ".join(self.parameters) or "any parameters"
        return f"patch {self.name}: target {self.target} ({parameters}) of {wants}; reason: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class PatchStatus:
    """What `explain` says about one patch."""

    patch: Patch
    """The record."""

    applied: bool
    """Whether the patch is in force now."""

    problem: str | None
    """Why it would not apply to the installed packages; None when it would."""

    unavailable: bool = False
    """Whether that is because the installed release is known not to have the target."""

    rebound: tuple[str, ...] = ()
    """`module.name` of every copy that was replaced along with the target."""

    hook_point: bool = False
    """Whether the target is a hook point, which a fork calls itself (`patching.hook_points`)."""

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready mapping."""
        return {
            "name": self.patch.name,
            "target": self.patch.target,
            "versions": self.patch.versions,
            "distribution": self.patch.distribution,
            "parameters": list(self.patch.parameters),
            "reason": self.patch.reason,
            "status": self.status,
            "problem": self.problem,
            "rebound": list(self.rebound),
            "hook_point": self.hook_point,
        }

    @property
    def status(self) -> str:
        """One word: `applied`, `available`, `unavailable` or `broken`."""
        if self.applied:
            return "applied"
        if self.unavailable:
            return "unavailable"
        return "broken" if self.problem else "available"
