# SPDX-License-Identifier: Apache-2.0
"""The spool: what the peers have uploaded for the open round, on the disk until the round is committed."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from megatron_ext.sync_service.disk.durable import sync_path
from megatron_ext.sync_service.disk.spares import SpareFiles
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.limits import Limits
from megatron_ext.sync_service.protocol.names import is_name, path_component
from megatron_ext.sync_service.values.contribution import Contribution, new_name, peer_of

__all__ = ["Spool", "round_of"]


class Spool:
    """Contributions that no round has used yet, at most one of each peer. May be used by several threads."""

    def __init__(self, folder: Path, spares: SpareFiles | None = None, limits: Limits | None = None) -> None:
        """Open the folder, or make it.

        Args:
            folder: of the contributions.
            spares: where their files come from and go to.
            limits: of a contribution; none unless given.
        """
        self._folder = folder
        self._spares = spares
        self._limits = limits
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._found: dict[str, tuple[int, Contribution]] = {}
        # What a former server has left, looked for once: there may be thousands of peers.
        self._left = {(path.parent.name, peer_of(path)): path for path in self._folder.glob("round-*/*.frames")}

    def open_round(self, number: int) -> None:
        """Move on to a round: files of earlier ones are removed."""
        with self._lock:
            for peer in [peer for peer, (found, _) in self._found.items() if found != number]:
                self._found.pop(peer)[1].discard()
            for entry in list(self._folder.iterdir()):
                found = round_of(entry)
                if found is not None and found < number:
                    shutil.rmtree(entry)
            self._of_round(number).mkdir(exist_ok=True)
            sync_path(self._folder)

    def keep(self, is_wanted: Callable[[str, int], bool]) -> None:
        """Remove contributions, those that a former server has left too, unless they are wanted.

        Args:
            is_wanted: says so of a contribution, given its peer and its round.
        """
        with self._lock:
            for path in list(self._folder.glob("round-*/*")):
                peer, number = peer_of(path), round_of(path.parent)
                if number is None or not is_name(peer) or is_wanted(peer, number):
                    continue
                if peer in self._found and self._found[peer][0] == number:
                    self._found.pop(peer)[1].discard()
                path.unlink(missing_ok=True)
            self._remove_empty()

    def contribution(self, peer: str, number: int, catalog: Catalog, codec: str) -> Contribution:
        """Return the contribution of a peer to a round, perhaps an empty one; one to another round is removed.

        What a former server has left of it is read when it is first used, for which no other caller waits.
        """
        with self._lock:
            if peer in self._found and self._found[peer][0] != number:
                self.discard(peer)
            if peer not in self._found:
                folder = self._of_round(number)
                if not folder.exists():
                    folder.mkdir()
                    sync_path(self._folder)
                self._found[peer] = number, self._opened(folder, peer, catalog, codec)
            return self._found[peer][1]

    def sent_alone(self, number: int, spec: TensorSpec) -> Contribution | None:
        """Return the contribution to a round that has all of a tensor; None while there is none, or are several."""
        with self._lock:
            found = [entry for at, entry in self._found.values() if at == number and entry.is_whole(spec)]
        return found[0] if len(found) == 1 else None

    def discard(self, peer: str) -> None:
        """Remove what a peer has uploaded."""
        with self._lock:
            if peer in self._found:
                self._found.pop(peer)[1].discard()
            for path in list(self._folder.glob(f"round-*/{peer}.*")):
                if peer_of(path) == peer:
                    path.unlink()
            self._remove_empty()

    def seal(self, peer: str, number: int, instance: str) -> None:
        """Write down, durably, which process has uploaded all of a contribution."""
        path = self._sealed(peer, number)
        with path.open("w") as file:
            file.write(instance)
            file.flush()
            os.fsync(file.fileno())
        sync_path(path.parent)

    def sealed_by(self, peer: str, number: int) -> str | None:
        """Return which process has uploaded all of a contribution, as far as that was written down."""
        path = self._sealed(peer, number)
        return path.read_text() if path.exists() else None

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by peer."""
        with self._lock:
            return {peer: contribution.nbytes for peer, (_, contribution) in self._found.items()}

    def _opened(self, folder: Path, peer: str, catalog: Catalog, codec: str) -> Contribution:
        """Return a peer's contribution in the folder of a round."""
        left = self._left.pop((folder.name, peer), None)
        if left is not None and left.exists():
            return Contribution(left, catalog, codec, self._spares, reads_later=True, limits=self._limits)
        path = folder / new_name(peer)
        if self._spares is not None:
            self._spares.take(path)
        return Contribution(path, catalog, codec, self._spares, is_new=True, limits=self._limits)

    def _remove_empty(self) -> None:
        for folder in list(self._folder.iterdir()):
            if round_of(folder) is not None and not any(folder.iterdir()):
                folder.rmdir()

    def _sealed(self, peer: str, number: int) -> Path:
        return self._of_round(number) / f"{path_component(peer, 'peer')}.sealed"

    def _of_round(self, number: int) -> Path:
        return self._folder / f"round-{number:08d}"


def round_of(folder: Path) -> int | None:
    """Return for which round contributions are in a folder, by its name; None when it is for none."""
    found = re.fullmatch(r"round-(\d{8,})", folder.name)
    return None if found is None else int(found[1])
