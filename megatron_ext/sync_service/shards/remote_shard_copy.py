# SPDX-License-Identifier: Apache-2.0
"""A copy of the values that a shard has, at a URL: the shard resumes from it on another machine.

    URL/RUN/shard-K/owner.json                           which server writes there
    URL/RUN/shard-K/shard.json                           to which run and which part of it the values belong
    URL/RUN/shard-K/snapshots/round-N.safetensors        the values of the newest rounds

A shard has no journal that says whose values are newer. It is the folder that wrote last: a server leaves the token by
which it owned the copy in its folder, and a folder with another one takes what is at the URL in place of its own.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.sync_service.disk.durable import replace_file
from megatron_ext.sync_service.shards.remote_folder import RemoteFolder

__all__ = ["ShardCopy"]

log = logging.getLogger(__name__)

IDENTITY = "shard.json"
_TOKEN = "copied.token"


def _newest(names: Iterable[str]) -> str:
    """Return the newest of the files that are snapshots; empty when none is."""
    return max((name for name in names if name.endswith(".safetensors")), default="")


class ShardCopy(RemoteFolder):
    """The copy of one shard of a run."""

    def __init__(self, url: str, run: str, shard: int) -> None:
        """Find it, or make it.

        Args:
            url: such as s3://bucket/folder.
            run: the run id.
            shard: which one.

        Raises:
            UserError: the place cannot be used.
        """
        super().__init__(url, run, f"shard-{shard}")

    def meet(self, folder: Path) -> None:
        """Own the copy, and bring it and the shard's folder to the same state.

        Args:
            folder: of the shard.

        Raises:
            UserError: they belong to different runs, or one cannot be read or written.
        """
        path, token = folder / IDENTITY, folder / _TOKEN
        there = self._identity()
        if there is not None and path.exists() and path.read_bytes() != there:
            raise UserError(
                f"state {self.url}: has values of another run or shard than {folder}; give another URL, or move that "
                "folder away to resume from the URL"
            )
        with self._reading():
            owner = self._owner()
        ours = token.read_text().split() if token.exists() else []
        is_elsewhere = owner is not None and owner["token"] not in ours
        here, copied = _newest(p.name for p in (folder / "snapshots").glob("*")), _newest(self._snapshot_sizes())
        if is_elsewhere and here > copied:
            raise UserError(
                f"state {self.url}: another server wrote there last, and has no values after {copied or 'the start'}, "
                f"but {folder} has {here}; give another URL, or move that folder away to resume from the URL"
            )
        try:
            if not is_elsewhere:
                # Should this end before everything is copied, the copy is still this folder's.
                replace_file(token, " ".join([*ours, self._token]).encode())
            self._own()
            if is_elsewhere:
                self._take(folder)
            self._put_missing(folder / "snapshots")
            if path.exists():
                self.put_identity(path.read_bytes())
        except OSError as error:
            raise UserError(str(error)) from error
        replace_file(token, self._token.encode())

    def put_identity(self, identity: bytes) -> None:
        """Say what the values belong to.

        Raises:
            OSError: it could not be written, or another server owns the copy.
        """
        self._require_ownership()
        with self._writing():
            self._put_whole(f"{self._root}/{IDENTITY}", identity)

    def _identity(self) -> bytes | None:
        path = f"{self._root}/{IDENTITY}"
        with self._reading():
            return bytes(self._files.cat_file(path)) if self._files.exists(path) else None

    def _take(self, folder: Path) -> None:
        """Put what is there in the place of what is in the folder, whose uploads have been overtaken."""
        identity = self._identity()
        if identity is None:
            return  # the run had not begun
        log.info("the shard in %s resumes from %s", folder, self.url)
        for name in ("spool", "snapshots"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "snapshots").mkdir(parents=True)
        self.get_snapshots(folder / "snapshots")
        replace_file(folder / IDENTITY, identity)
