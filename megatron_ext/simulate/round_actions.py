# SPDX-License-Identifier: Apache-2.0
"""What the schedule of rounds asks for at which step of an interval: the engine's `advance`, without its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_ext.local_sgd.schedule import RoundSchedule
from megatron_ext.local_sgd.streaming import StreamingConfig

__all__ = ["RoundAction", "actions_by_step"]


@dataclass(frozen=True, kw_only=True)
class RoundAction:
    """Something that a fragment's round does after a step."""

    kind: Literal["sync", "send", "turn_late", "turn", "end"]
    """A whole round at once; its begin in the background; an eager round's answer; the outer step; its end."""

    fragment: int
    """Which."""


def actions_by_step(streaming: StreamingConfig, interval: int) -> list[dict[int, list[RoundAction]]]:
    """Return what is done after which step, counted from 1, of the first interval and of every later one.

    A round ends before the fragment's next one begins, so that from the second interval on all are alike.

    Args:
        streaming: fragments and delay.
        interval: H.
    """
    schedule = RoundSchedule(
        streaming.fragments, interval=interval, delay=streaming.sync_delay, eager=streaming.eager
    )
    phases = ["home"] * streaming.fragments
    found: list[dict[int, list[RoundAction]]] = []
    for _ in range(2):
        actions: dict[int, list[RoundAction]] = {}
        for step in range(1, interval + 1):
            schedule.count()
            due = list(_after_step(schedule, phases, streaming))
            if due:
                actions[step] = due
            schedule.end_of_step()
        found.append(actions)
    return found


def _after_step(schedule: RoundSchedule, phases: list[str], streaming: StreamingConfig) -> list[RoundAction]:
    found = []

    def act(kind: Literal["sync", "send", "turn_late", "turn", "end"], fragment: int) -> None:
        found.append(RoundAction(kind=kind, fragment=fragment))

    def end(fragment: int) -> None:
        if phases[fragment] == "sent":
            act("turn", fragment)
        act("end", fragment)
        phases[fragment] = "home"

    for fragment in range(len(phases)):
        if schedule.answers(fragment):
            act("turn_late", fragment)
        if phases[fragment] == "sent" and schedule.turns(fragment):
            act("turn", fragment)
            phases[fragment] = "turned"
        if phases[fragment] != "home" and schedule.ends(fragment):
            end(fragment)
    for fragment in range(len(phases)):
        if not schedule.begins(fragment):
            continue
        if not streaming.in_background:
            act("sync", fragment)
            continue
        act("send", fragment)
        phases[fragment] = "sent"
        schedule.launch(fragment)
        if schedule.ends(fragment):
            end(fragment)
    return found
