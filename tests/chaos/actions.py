# SPDX-License-Identifier: Apache-2.0
"""What each kind of fault does to a run, when it begins and when it ends."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.chaos.history import Struck
from tests.chaos.schedule import SERVER

if TYPE_CHECKING:
    from tests.chaos.synthetic import Synthetic

__all__ = ["begin", "end"]

_JUMPS = (-2 * 365 * 86400.0, -86400.0, -3600.0, 3600.0, 86400.0, 2 * 365 * 86400.0)


def begin(run: Synthetic, struck: Struck) -> None:
    """Let a fault begin."""
    _BEGIN[struck.fault.kind](run, struck, random.Random(struck.fault.dice))


def end(run: Synthetic, struck: Struck) -> None:
    """Let a fault end."""
    _END.get(struck.fault.kind, _nothing)(run, struck, random.Random(struck.fault.dice))


def _nothing(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    """What does not last has no end."""


def _kill(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    run.kill(struck.fault.target)


def _start(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    run.start(struck.fault.target)


def _pause(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    run.processes[struck.fault.target].kill(signal.SIGSTOP)


def _resume(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    run.processes[struck.fault.target].kill(signal.SIGCONT)


def _cut_up(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    run.relays[struck.fault.target].up.is_open = False


def _cut_down(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    run.relays[struck.fault.target].down.is_open = False


def _slow_link(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    link = run.relays[struck.fault.target]
    link.up.rate = link.down.rate = dice.uniform(1e5, 1e6)


def _corrupt_up(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    run.relays[struck.fault.target].up.flips = dice.randint(1, 3)


def _corrupt_down(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    run.relays[struck.fault.target].down.flips = dice.randint(1, 3)


def _repair(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    run.relays[struck.fault.target].repair()


def _slow_disk(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    run.strains[struck.fault.target].slow_disk(dice.uniform(0.02, 0.2))


def _quick_disk(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    run.strains[struck.fault.target].slow_disk(0.0)


def _full_disk(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    # The first server's journal grows; the others' files are small, and of one size.
    size = run.journal.stat().st_size if struck.fault.target == SERVER else 0
    run.limit_files(struck.fault.target, size + dice.choice((0, 10, 1000, 100_000)))


def _room(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    run.limit_files(struck.fault.target, -1)


def _clock(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    run.strains[struck.fault.target].jump(dice.choice(_JUMPS))


def _poison(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    path = run.folder / f"{struck.fault.target}.poison"
    path.with_suffix(".new").write_text(dice.choice(("nan", "infinity", "huge", "large")))
    path.with_suffix(".new").replace(path)


def _flip_snapshot(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    state = run.killed(struck.fault.target)
    run.damage(struck, max(state.glob("snapshots/*.safetensors"), default=None), dice)


def _flip_journal(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    run.kill(SERVER)
    run.damage(struck, run.journal, dice)


def _flip_spool(run: Synthetic, struck: Struck, dice: random.Random) -> None:
    state = run.killed(struck.fault.target)
    found = sorted(path for path in state.glob("spool/round-*/*.frames") if path.stat().st_size)
    run.damage(struck, dice.choice(found) if found else None, dice)


_Do = Callable[["Synthetic", Struck, random.Random], None]

_BEGIN: dict[str, _Do] = {
    "server killed": _kill,
    "server stopped": _pause,
    "peer killed": _kill,
    "peer stopped": _pause,
    "no way up": _cut_up,
    "no way down": _cut_down,
    "slow link": _slow_link,
    "slow disk": _slow_disk,
    "full disk": _full_disk,
    "clock jump": _clock,
    "corrupt frames up": _corrupt_up,
    "corrupt frames down": _corrupt_down,
    "poisoned values": _poison,
    "bit flip in the snapshot": _flip_snapshot,
    "bit flip in the journal": _flip_journal,
    "bit flip in the spool": _flip_spool,
}

_END: dict[str, _Do] = {
    "server killed": _start,
    "server stopped": _resume,
    "peer killed": _start,
    "peer stopped": _resume,
    "no way up": _repair,
    "no way down": _repair,
    "slow link": _repair,
    "corrupt frames up": _repair,
    "corrupt frames down": _repair,
    "slow disk": _quick_disk,
    "full disk": _room,
    "bit flip in the snapshot": _start,
    "bit flip in the journal": _start,
    "bit flip in the spool": _start,
}
