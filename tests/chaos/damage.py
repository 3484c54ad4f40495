# SPDX-License-Identifier: Apache-2.0
"""A bit that was flipped in a file of the server, until it is found and the file repaired, as an operator would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.history import Struck
from tests.sync_service.service import Process, Zygote

__all__ = ["REBUILT", "Damage"]

REBUILT = "; the journal was rebuilt"
"""How the outcome of a damage ends that was repaired so; from a copy, otherwise."""


class Damage:
    """One."""

    def __init__(self, struck: Struck, path: Path, newest: int, dice: random.Random) -> None:
        """Flip the bit.

        Args:
            struck: the fault, whose outcome is written down.
            path: of the file.
            newest: round that is committed.
            dice: says which bit, and how a journal is repaired.
        """
        self.struck = struck
        self.newest = newest
        """The newest round when the bit was flipped."""
        self._path, self._whole = path, path.read_bytes()
        damaged = bytearray(self._whole)
        at, bit = dice.randrange(len(damaged)), dice.randrange(8)
        damaged[at] ^= 1 << bit
        path.write_bytes(damaged)
        self._what = f"bit {bit} of byte {at} of {len(damaged)} of {path.name}"
        self._recovers = path.name == "journal.jsonl" and dice.random() < 0.5

    def was_refused(self, output: str) -> bool:
        """Return whether a server that has ended said that it is because of this file."""
        is_named = self._path.name in output and "error" in output
        if is_named:
            self.struck.outcome = f"refused at the start ({self._what})"
        return is_named

    def is_noticed(self, output: str, told: Sequence[str]) -> bool:
        """Return whether a server that runs, or a peer, has said that the file is damaged."""
        if self._path.suffix != ".safetensors":
            return False
        # Its own run has a server refuse to start; that of another server's, to follow that one.
        does_not_follow = "cannot follow the first server" in output and self._path.name in output
        is_said_there = "listening at" in output and ("damaged on the disk" in output or does_not_follow)
        is_said = is_said_there or any("snapshot on the server is damaged" in said for said in told)
        if is_said:
            self.struck.outcome = f"noticed at use ({self._what})"
        return is_said

    def is_over(self) -> None:
        """Say that nobody has complained, and the file is no longer of use."""
        self.struck.outcome = f"healed ({self._what})"

    def give_up(self) -> None:
        """Say that another fault came before anybody complained; the file is as it was, if it is there."""
        self.struck.outcome = f"not seen before the next fault ({self._what})"
        self._restore()

    def repair(self, zygote: Zygote, folder: Path) -> None:
        """Bring the file back, from a copy or with `server recover`; the server is away."""
        if self._recovers:
            log = folder / f"recover.{len(list(folder.glob('recover.*.log')))}.log"
            process = Process(zygote, log, {"argv": ["server", "recover", str(self._path.parent)]})
            if process.wait() == 0:
                self.struck.outcome += REBUILT
                return
            self.struck.outcome += f"; it could not be rebuilt: {process.output.strip().splitlines()[-1:]}"
        self._restore()
        self.struck.outcome += "; restored from a copy"

    def _restore(self) -> None:
        if self._path.exists():
            self._path.write_bytes(self._whole)
