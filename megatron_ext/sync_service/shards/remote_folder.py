# SPDX-License-Identifier: Apache-2.0
"""A folder at a URL, through fsspec, in which one server at a time keeps a copy of snapshots.

    URL/.../owner.json                           which server writes there
    URL/.../snapshots/round-N.safetensors        the values of the newest rounds

The last server that started with the URL owns it. Another one that still runs finds out before it writes.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Container, Iterator, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.sync_service.disk.durable import sync_path
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.disk.snapshot_names import newest_of, snapshot_number
from megatron_ext.sync_service.protocol.field_checks import Malformed, check_count, check_number, check_text
from megatron_ext.sync_service.protocol.names import path_component
from megatron_ext.sync_service.protocol.schema import parse, record

__all__ = ["RemoteFolder"]

log = logging.getLogger(__name__)

_FILE_LIKE = frozenset({"file", "local", "sftp", "ssh"})
"""fsspec's stores of files: writing to one empties it first, and renaming one replaces a file of that name."""

_PARTIAL = "partial-"

_UNKNOWN: dict[str, Any] = {"token": None, "host": "an unknown host", "process": "unknown", "since": 0.0}
_YEAR_3000 = 32503680000.0


class RemoteFolder:
    """A folder at a URL. Not for several threads at once, except that a snapshot may be put at any time."""

    def __init__(self, url: str, *within: str, holding: tuple[str, ...] = ("snapshots",)) -> None:
        """Find it, or make it.

        Args:
            url: such as s3://bucket/folder.
            within: names of the folders that lead from there to this one.
            holding: folders in it.

        Raises:
            UserError: fsspec or what it needs for this kind of URL is not installed, or the place cannot be used.
        """
        self.url = url
        self._token = uuid.uuid4().hex
        try:
            import fsspec
        except ImportError as error:
            raise UserError(f"state {url}: needs the package fsspec; install it with: pip install fsspec") from error
        try:
            self._files, root = fsspec.core.url_to_fs(url)
            self._root = "/".join([root.rstrip("/"), *(path_component(name, "folder") for name in within)])
            for name in holding:
                self._files.makedirs(f"{self._root}/{name}", exist_ok=True)
        except ImportError as error:
            raise UserError(f"state {url}: {error}") from error
        # Every kind of store has errors of its own.
        except Exception as error:
            raise UserError(f"state {url}: cannot be used: {type(error).__name__}: {error}") from error

    def put_snapshot(self, path: Path) -> None:
        """Copy a snapshot there.

        Raises:
            OSError: it could not be written, or another server owns the copy.
        """
        self._require_ownership()
        with self._writing(), self._whole(f"{self._root}/snapshots/{path.name}") as name:
            self._files.put_file(str(path), name)

    def drop_snapshots(self, wanted: Set[str]) -> None:
        """Remove snapshots that are older than the newest of these and none of them; the log says if they cannot be."""
        try:
            self._require_ownership()
            with self._writing():
                for path in self._listed("snapshots"):
                    name = path.rpartition("/")[2]
                    number = snapshot_number(name)
                    if name not in wanted and number is not None and number < newest_of(wanted):
                        self._files.rm_file(path)
        except OSError as error:
            log.warning("%s; old snapshots stay", error)

    def _put_missing(self, folder: Path) -> None:
        """Copy the snapshots of a folder there that are not there yet."""
        sizes = self._snapshot_sizes()
        for snapshot in folder.glob("*.safetensors"):
            # One of the same name and size was copied before its round was committed.
            if snapshot_number(snapshot.name) is None or sizes.get(snapshot.name) == snapshot.stat().st_size:
                continue
            try:
                Snapshot(snapshot).close()
            except UserError as error:
                # Of a round that is needed this will be refused; then the copy must be what it was.
                log.warning("%s; it is not copied to %s", error, self.url)
                continue
            self.put_snapshot(snapshot)

    def get_snapshots(self, folder: Path, known: Container[str] = ()) -> None:
        """Copy the snapshots that are there into a folder, but those whose names are known.

        Raises:
            UserError: they cannot be read.
        """
        with self._reading():
            for name in self._listed("snapshots"):
                path = folder / path_component(name.rpartition("/")[2], "snapshot")
                if snapshot_number(path.name) is None or path.name in known:
                    continue
                beside = path.with_suffix(".partial")
                self._files.get_file(name, str(beside))
                sync_path(beside)
                beside.replace(path)
        sync_path(folder)

    def _own(self) -> None:
        """Become the one that writes."""
        with self._reading():
            before = self._owner()
        if before is not None:
            log.info("state %s was %s's; it writes nothing there any more", self.url, _described(before))
        mine = {"token": self._token, "host": socket.gethostname(), "process": os.getpid(), "since": time.time()}
        with self._writing():
            self._put_whole(f"{self._root}/owner.json", json.dumps(mine).encode())

    def _owner(self) -> dict[str, Any] | None:
        """Return the description of the server that writes."""
        path = f"{self._root}/owner.json"
        self._files.invalidate_cache()
        if not self._files.exists(path):
            return None
        try:
            return record(
                parse(self._files.cat_file(path)),
                "owner",
                dict,
                token=check_text,
                host=check_text,
                process=check_count,
                since=partial(check_number, least=0, most=_YEAR_3000),
            )
        except Malformed:
            log.warning("state %s: owner.json there is damaged, and says nothing", self.url)
            return _UNKNOWN

    def _require_ownership(self) -> None:
        with self._writing():
            owner = self._owner()
        if owner is None or owner["token"] != self._token:
            whose = "nobody" if owner is None else _described(owner)
            raise OSError(
                f"state {self.url}: belongs to {whose} now, and nothing that this server does counts any more; "
                "end it, and start one server alone with that URL"
            )

    def _put_whole(self, path: str, content: bytes) -> None:
        """Write a small file: readers find what was there before or all of this, whatever happens meanwhile."""
        with self._whole(path) as name:
            self._files.pipe_file(name, content)

    @contextmanager
    def _whole(self, path: str) -> Iterator[str]:
        """Yield where to write a file: readers find what was there before or all of it, whatever happens meanwhile."""
        if _FILE_LIKE.isdisjoint(_protocols(self._files)):
            yield path  # an object appears when all of it is there
            return
        folder, _, name = path.rpartition("/")
        beside = f"{folder}/{_PARTIAL}{name}"
        yield beside
        if "file" in _protocols(self._files):
            sync_path(Path(beside))
        self._files.mv(beside, path)

    def _snapshot_sizes(self) -> dict[str, int]:
        with self._reading():
            return {path.rpartition("/")[2]: int(self._files.size(path)) for path in self._listed("snapshots")}

    def _listed(self, folder: str) -> list[str]:
        self._files.invalidate_cache()
        found = sorted(str(path) for path in self._files.ls(f"{self._root}/{folder}", detail=False))
        return [path for path in found if not path.rpartition("/")[2].startswith(_PARTIAL)]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # every kind of store has errors of its own
            raise UserError(f"state {self.url}: cannot be read: {type(error).__name__}: {error}") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # likewise
            raise OSError(f"state {self.url} cannot be written: {type(error).__name__}: {error}") from error


def _protocols(files: Any) -> frozenset[str]:
    return frozenset([files.protocol] if isinstance(files.protocol, str) else files.protocol)


def _described(owner: dict[str, Any]) -> str:
    """Return a server in words."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(owner["since"]))
    return f"the server with process id {owner['process']} on {owner['host']}, started {since}"
