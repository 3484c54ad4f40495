# SPDX-License-Identifier: Apache-2.0
"""A copy of a run's durable state at a URL, through fsspec: another machine can go on from it.

    URL/RUN/owner.json                           which server writes there
    URL/RUN/journal/part-N.jsonl                 the lines of the journal, so many in each part
    URL/RUN/snapshots/round-N.safetensors        the values of the newest rounds

The server works in its folder. An event has happened once its line is in both places; the snapshot of a round is there
before the line that commits it. Contributions to the open round are not copied: their peers send them again.

The last server that started with a URL owns it. Another one that still runs finds out before and after everything that
it writes, and nothing that it does counts any more.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.sync_service.snapshot import snapshot_name

__all__ = ["LINES", "RemoteState"]

log = logging.getLogger(__name__)

_FILE_LIKE = frozenset({"file", "local", "sftp", "ssh"})
"""fsspec's stores of files: who writes one anew empties it first, and who renames one replaces what has that name."""

_PARTIAL = "partial-"

_UNKNOWN: dict[str, Any] = {"token": None, "host": "an unknown host", "process": "unknown", "since": 0.0}

LINES = 500
"""Of the journal in a part: object stores cannot append, so that the last part is written anew with every line."""


class RemoteState:
    """The copy of one run. Not for several threads at once, but that a snapshot may be put beside all else."""

    def __init__(self, url: str, run: str) -> None:
        """Find what is there.

        Args:
            url: such as s3://bucket/folder.
            run: the run id.

        Raises:
            UserError: fsspec or what it needs for this kind of URL is not installed, or the place cannot be used.
        """
        self._url = url
        self._token = uuid.uuid4().hex
        try:
            import fsspec
        except ImportError as error:
            raise UserError(f"state {url}: needs the package fsspec; install it with: pip install fsspec") from error
        try:
            self._files, root = fsspec.core.url_to_fs(url)
            self._root = f"{root.rstrip('/')}/{run}"
            self._files.makedirs(f"{self._root}/journal", exist_ok=True)
            self._files.makedirs(f"{self._root}/snapshots", exist_ok=True)
        except ImportError as error:
            raise UserError(f"state {url}: {error}") from error
        # Every kind of store has errors of its own.
        except Exception as error:
            raise UserError(f"state {url}: cannot be used: {type(error).__name__}: {error}") from error
        self._parts = self._read_parts()

    def meet(self, folder: Path) -> None:
        """Own the copy, and bring it and the server's folder to the same state, that of the one which has seen more.

        Args:
            folder: of the run.

        Raises:
            UserError: each has seen what the other has not, or one cannot be read.
            OSError: the copy cannot be written.
        """
        path = folder / "journal.jsonl"
        here = path.read_bytes() if path.exists() else b""
        # A line that was cut off has not happened.
        here = here[: here.rfind(b"\n") + 1]
        # Who has no business here must not drive away who has.
        self._compare(here, folder)
        self._check_snapshots(here)
        self._own()
        self._parts = self._read_parts()
        self._compare(here, folder)
        there = b"".join(self._parts)
        if here.startswith(there):
            for line in here[len(there) :].splitlines(keepends=True):
                self._parts = _extended(self._parts, line)
            for number in range(there.count(b"\n") // LINES, len(self._parts)):
                self._put_part(number, self._parts[number])
            sizes = self._snapshot_sizes()
            for snapshot in (folder / "snapshots").glob("*.safetensors"):
                # One of the same name and size was copied before its round was committed.
                if sizes.get(snapshot.name) != snapshot.stat().st_size:
                    self.put_snapshot(snapshot)
            return
        log.info("run in %s goes on from %s", folder, self._url)
        # What was uploaded there has been overtaken.
        shutil.rmtree(folder / "spool", ignore_errors=True)
        (folder / "snapshots").mkdir(parents=True, exist_ok=True)
        with self._reading():
            for name in self._listed("snapshots"):
                self._files.get_file(name, str(folder / "snapshots" / name.rpartition("/")[2]))
        path.with_suffix(".new").write_bytes(there)
        path.with_suffix(".new").replace(path)

    def _compare(self, here: bytes, folder: Path) -> None:
        """Refuse a journal that is not the beginning of the copy's, nor the other way round."""
        there = b"".join(self._parts)
        if not (here.startswith(there) or there.startswith(here)):
            raise UserError(
                f"state {self._url}: has another history than {folder}: two servers have used it, or another run of "
                "that name; give another URL, or move that folder away to go on from the URL"
            )

    def _check_snapshots(self, here: bytes) -> None:
        """Refuse a copy whose journal has lost rounds that it has snapshots of, which would be deleted as unknown."""
        committed = [-1]
        for line in max(here, b"".join(self._parts), key=len).splitlines():
            with suppress(ValueError, TypeError, KeyError):
                event = json.loads(line)
                if event["event"] == "committed":
                    committed.append(event["round"])
        # A snapshot is there before its round is committed.
        unknown = [name for name in self._snapshot_sizes() if name > snapshot_name(committed[-1] + 1)]
        if unknown:
            newest = "none" if committed[-1] < 0 else committed[-1]
            raise UserError(
                f"state {self._url}: has the snapshot {max(unknown)}, but the newest round of its journal is {newest}: "
                "the journal there has lost lines; restore it from a copy, start the server with the folder that has "
                "them, or give another URL"
            )

    def _own(self) -> None:
        """Become the one that writes."""
        with self._reading():
            before = self._owner()
        if before is not None:
            log.info("state %s was %s's; it writes nothing there any more", self._url, _described(before))
        mine = {"token": self._token, "host": socket.gethostname(), "process": os.getpid(), "since": time.time()}
        with self._writing():
            self._put_whole(f"{self._root}/owner.json", json.dumps(mine).encode())

    def _owner(self) -> dict[str, Any] | None:
        """Return what the server that writes says of itself."""
        path = f"{self._root}/owner.json"
        self._files.invalidate_cache()
        if not self._files.exists(path):
            return None
        try:
            return {**_UNKNOWN, **json.loads(self._files.cat_file(path))}
        except (ValueError, TypeError):
            log.warning("state %s: owner.json there is damaged, and says nothing", self._url)
            return _UNKNOWN

    def _require_ownership(self) -> None:
        with self._writing():
            owner = self._owner()
        if owner is None or owner["token"] != self._token:
            whose = "nobody" if owner is None else _described(owner)
            raise OSError(
                f"state {self._url}: belongs to {whose} now, and nothing that this server does counts any more; "
                "end it, and start one server alone with that URL"
            )

    def append(self, line: bytes) -> None:
        """Add a line.

        Raises:
            OSError: it could not be written, or another server owns the copy.
        """
        parts = _extended(self._parts, line)
        self._put_part(len(parts) - 1, parts[-1])
        self._parts = parts

    def put_snapshot(self, path: Path) -> None:
        """Copy a snapshot there.

        Raises:
            OSError: it could not be written, or another server owns the copy.
        """
        self._require_ownership()
        with self._writing():
            self._files.put_file(str(path), f"{self._root}/snapshots/{path.name}")

    def drop_snapshots(self, wanted: Set[str]) -> None:
        """Remove the snapshots of other names; the log says when they cannot be removed."""
        try:
            self._require_ownership()
            with self._writing():
                for path in self._listed("snapshots"):
                    if path.rpartition("/")[2] not in wanted:
                        self._files.rm_file(path)
        except OSError as error:
            log.warning("%s; old snapshots stay", error)

    def _put_part(self, number: int, content: bytes) -> None:
        self._require_ownership()
        with self._writing():
            self._put_whole(f"{self._root}/journal/part-{number:08d}.jsonl", content)
        # Another server that has become the owner meanwhile may have read the copy without this.
        self._require_ownership()

    def _put_whole(self, path: str, content: bytes) -> None:
        """Write a small file: readers find what was there before or all of this, whatever happens meanwhile."""
        if _FILE_LIKE.isdisjoint(_protocols(self._files)):
            self._files.pipe_file(path, content)  # an object appears when all of it is there
            return
        folder, _, name = path.rpartition("/")
        beside = f"{folder}/{_PARTIAL}{name}"
        with self._files.open(beside, "wb") as file:
            file.write(content)
            file.flush()
            if "file" in _protocols(self._files):
                os.fsync(file.fileno())
        self._files.mv(beside, path)

    def _read_parts(self) -> list[bytes]:
        with self._reading():
            return [self._files.cat_file(path) for path in self._listed("journal")]

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
        except Exception as error:
            raise UserError(f"state {self._url}: cannot be read: {type(error).__name__}: {error}") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise OSError(f"state {self._url} cannot be written: {type(error).__name__}: {error}") from error


def _protocols(files: Any) -> frozenset[str]:
    return frozenset([files.protocol] if isinstance(files.protocol, str) else files.protocol)


def _described(owner: dict[str, Any]) -> str:
    """Return a server in words."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(owner["since"]))
    return f"the server with process id {owner['process']} on {owner['host']}, started {since}"


def _extended(parts: list[bytes], line: bytes) -> list[bytes]:
    """Return the parts of a journal with one more line."""
    if not parts or parts[-1].count(b"\n") >= LINES:
        return [*parts, line]
    return [*parts[:-1], parts[-1] + line]
