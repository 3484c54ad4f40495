# SPDX-License-Identifier: Apache-2.0
"""What a row of the support table is, and short words to write rows with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["ABILITIES", "Asked", "Row", "Verdict", "asks_for", "differs", "option", "refused", "says", "tested"]

ABILITIES = {
    "cpu": "on CPU",
    "local-sgd": "with local SGD",
    "hot-switch": "with hot switching",
    "sync-service": "with the sync service",
}
"""The abilities and backends that the table knows, and how a sentence speaks of them."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One option (or one value of it) and what is known about it."""

    option: str
    """The flag, with the value that is meant where the row speaks of one."""

    applies_to: tuple[str, ...]
    """Keys of `ABILITIES`."""

    status: Literal["supported", "refused"]
    """Whether a run with the option starts."""

    asked: Callable[[Any], bool]
    """Whether Megatron's arguments, parsed and not yet validated, ask for the option."""

    tested_by: str = ""
    """The test that runs the option: `tests/...py::name`. Empty when refused."""

    reason: str = ""
    """Why it is refused. Empty when supported."""

    way_out: str = ""
    """What to write instead. Empty when supported."""

    def __post_init__(self) -> None:
        """Check that the row says what its status calls for.

        Raises:
            ValueError: a supported row without a test, a refused one without a reason, an unknown ability.
        """
        if (self.status == "supported") != bool(self.tested_by) or (self.status == "refused") != bool(self.reason):
            raise ValueError(f"support table, {self.option}: 'supported' needs a test, 'refused' needs a reason")
        unknown = set(self.applies_to) - set(ABILITIES)
        if unknown or not self.applies_to:
            raise ValueError(f"support table, {self.option}: unknown abilities {sorted(unknown)}")


Verdict = dict[str, str]
"""The fields of a row that say whether its option is supported."""

Asked = Callable[[Any], bool]
"""Whether Megatron's arguments ask for an option."""


def tested(by: str) -> Verdict:
    """Return the verdict of an option that the test `by`, `tests/...py::name`, runs."""
    return {"tested_by": by}


def refused(reason: str, way_out: str = "drop it") -> Verdict:
    """Return the verdict of an option that does not work for `reason`."""
    return {"reason": reason, "way_out": way_out}


def option(
    option: str,
    asked: Asked | None = None,
    *,
    cpu: Verdict | None = None,
    local_sgd: Verdict | None = None,
    hot_switch: Verdict | None = None,
    sync_service: Verdict | None = None,
) -> list[Row]:
    """Return one row per verdict.

    Args:
        option: the flag, perhaps with a value.
        asked: whether the arguments ask for it; by default whether the flag's own variable is set.
        cpu: verdict for the CPU backend, None to leave it out of the table.
        local_sgd: verdict for local SGD.
        hot_switch: verdict for hot switching.
        sync_service: verdict for a job that meets others at the sync service.
    """
    asked = asked or asks_for(option.split()[0].removeprefix("--").replace("-", "_"))
    verdicts = {"cpu": cpu, "local-sgd": local_sgd, "hot-switch": hot_switch, "sync-service": sync_service}
    return [
        Row(
            option=option,
            applies_to=(ability,),
            status="supported" if "tested_by" in verdict else "refused",
            asked=asked,
            tested_by=verdict.get("tested_by", ""),
            reason=verdict.get("reason", ""),
            way_out=verdict.get("way_out", ""),
        )
        for ability, verdict in verdicts.items()
        if verdict is not None
    ]


def asks_for(name: str) -> Asked:
    """Return whether the variable `name` is set to anything but its empty value."""
    return lambda args: bool(getattr(args, name))


def differs(name: str, *values: Any) -> Asked:
    """Return whether the variable `name` has none of `values`."""
    return lambda args: getattr(args, name) not in values


def says(name: str, *values: Any) -> Asked:
    """Return whether the variable `name` has one of `values`."""
    return lambda args: getattr(args, name) in values
