# SPDX-License-Identifier: Apache-2.0
"""Ranks that do not wait for each other end after the same iteration, without a collective.

Before a rank begins an iteration it writes that down in the store of the process group, and only then looks whether a
rank wants to end. One that wants to says so first, and only then reads what all have begun. The store does one thing
after another: a rank whose next iteration was not read sees the wish before it begins that one. So the highest one that
was read is one that all ranks come to and none has passed. Several ranks may read; the first one's answer counts.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CommonStop"]


class CommonStop:
    """The iteration after which all ranks end, once one of them wants to."""

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int) -> None:
        """Prepare.

        Args:
            store: torch's, that of all ranks.
            prefix: of the keys that are used, which nobody else uses.
            rank: this one.
            world_size: how many there are.
        """
        self._store, self._prefix, self._rank, self._world_size = store, prefix, rank, world_size
        self.iteration: int | None = None
        """After which all end; None while this rank knows of none that wants to."""

    def is_reached(self, iteration: int, *, wanted: bool) -> bool:
        """Return whether all ranks end after this iteration; each asks after every iteration at which they do not meet.

        A rank that is told of a wish waits until every other has been here once.

        Args:
            iteration: the one that this rank has made.
            wanted: whether this rank wants to end, from now on every time.
        """
        if self.iteration is None:
            self._store.set(self._begun(self._rank), str(iteration + 1))
            if self.is_wanted(wanted=wanted):
                self.iteration = self._agree()
        # Iterations that are skipped do not ask.
        return self.iteration is not None and iteration >= self.iteration

    def is_wanted(self, *, wanted: bool) -> bool:
        """Return whether any rank wants to end, for ranks that may meet sooner than they would otherwise.

        Args:
            wanted: whether this rank does.
        """
        if wanted:
            self._store.set(self._key("wanted"), "yes")
        return wanted or bool(self._store.check([self._key("wanted")]))

    def _agree(self) -> int:
        highest = max(int(self._store.get(self._begun(rank))) for rank in range(self._world_size))
        return int(self._store.compare_set(self._key("stop"), "", str(highest)))

    def _begun(self, rank: int) -> str:
        return self._key(f"begun by {rank}")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"
