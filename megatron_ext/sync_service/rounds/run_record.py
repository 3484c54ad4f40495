# SPDX-License-Identifier: Apache-2.0
"""The record of a run: what the snapshot of a round says besides the values, so that it explains itself.

It is in the file before that has its name, and the file has its name before the journal's line that commits the round
is written, and when every shard has its part. So a whole snapshot with a record is a round that was made and decided:
the record has the journal's line that commits it, and the state of the run that the line changes, from which a journal
that was lost is rebuilt.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, fields
from typing import Any

from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.rounds.journal import Event

__all__ = ["RunRecord"]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a snapshot says of its run."""

    committed: Event
    """The event that commits the round."""

    before: dict[str, Any]
    """The state of the run before that, as `RunState.as_json` has it."""

    journal_bytes: int
    """Of all lines that the journal had then."""

    journal_crc: int
    """Of the same, CRC-32."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> RunRecord | None:
        """Return the record in a snapshot; None without one, as of a release before there were any, or of a shard.

        Raises:
            OSError: it is damaged.
        """
        content = snapshot.record
        return cls(**json.loads(content)) if content else None

    def to_bytes(self) -> bytes:
        """Return what `of` finds in a snapshot."""
        return json.dumps({entry.name: getattr(self, entry.name) for entry in fields(self)}).encode()

    @property
    def number(self) -> int:
        """The round."""
        return int(self.committed["round"])

    @property
    def agreed(self) -> dict[str, str]:
        """What the run's peers agreed on beside the tensors."""
        created = self.before.get("created") or {}
        return dict(created.get("config") or {})

    @property
    def digest(self) -> str:
        """Of its values."""
        return str(self.committed["digest"])

    def follows(self, journal: bytes) -> bool:
        """Return whether a journal has all lines that there were when the round had been made."""
        known = journal[: self.journal_bytes]
        return len(known) == self.journal_bytes and zlib.crc32(known) == self.journal_crc

    def events(self) -> list[Event]:
        """Return events that lead to the run as it was when the round was committed, whatever was before them."""
        return [{"event": "recovered", "round": self.number, "state": self.before}, self.committed]
