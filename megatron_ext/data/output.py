# SPDX-License-Identifier: Apache-2.0
"""The three output files PREFIX.bin, PREFIX.idx and PREFIX.json: all of them or none.

They are written in a hidden folder next to their destination, `.NAME.partial`, held by a file lock, and moved
into place when complete. What a killed run leaves in that folder is overwritten or removed by the next one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError

__all__ = [
    "SIDECAR_FAMILY",
    "SIDECAR_FORMAT",
    "check_prefix",
    "has_sidecar",
    "output_paths",
    "publish",
    "read_sidecar",
    "refuse_existing",
    "refuse_foreign_description",
    "staging_folder",
    "why_not_reusable",
    "write_sidecar",
]

SIDECAR_FAMILY = "megatron-ext corpus "
"""How the value of the key `format` in PREFIX.json begins, of any release."""

SIDECAR_FORMAT = SIDECAR_FAMILY + "1"
"""Value of the key `format` in PREFIX.json."""

_SIDECAR_PROBE_BYTES = 4096
"""The key `format` comes first in PREFIX.json."""

_LOCK_NAME = "lock"


def output_paths(prefix: Path) -> dict[str, Path]:
    """Return the output files of a prefix by their suffix: `bin`, `idx`, `json`."""
    return {suffix: prefix.with_name(f"{prefix.name}.{suffix}") for suffix in ("bin", "idx", "json")}


def check_prefix(given: str) -> Path:
    """Return the prefix as a path.

    Raises:
        UserError: It is empty, names a folder, or carries one of the suffixes.
    """
    prefix = Path(given)
    name = os.path.basename(given)
    # Megatron itself makes a folder PREFIX/cache for its index files: that one is not a mistake.
    is_folder = prefix.is_dir() and any(entry.name != "cache" for entry in prefix.iterdir())
    if not given:
        raise UserError("--output-prefix is empty; give a name, such as corpus")
    if name in ("", ".", "..") or is_folder:
        raise UserError(
            f"--output-prefix {given}: names a folder; add a name, as in {given.rstrip('/')}/corpus"
        )
    if prefix.suffix in (".bin", ".idx"):
        raise UserError(f"--output-prefix {given}: leave out the suffix {prefix.suffix}")
    return prefix


def has_sidecar(prefix: Path) -> bool:
    """Return whether there is a PREFIX.json that `data prepare` wrote, of this release or another."""
    try:
        with open(output_paths(prefix)["json"], "rb") as file:
            head = file.read(_SIDECAR_PROBE_BYTES)
            if SIDECAR_FAMILY.encode() not in head:
                return False  # a user's data, which may be large
            content = json.loads(head + file.read())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and str(content.get("format")).startswith(SIDECAR_FAMILY)


def refuse_foreign_description(prefix: Path) -> None:
    """Refuse to replace a PREFIX.json that is something else, such as the input that the corpus is made of.

    Raises:
        UserError: There is such a file.
    """
    path = output_paths(prefix)["json"]
    if path.exists() and not has_sidecar(prefix):
        raise UserError(
            f"output {path}: is there already and not a description that data prepare wrote, so that even "
            "--overwrite keeps it; use another --output-prefix"
        )


def refuse_existing(prefix: Path) -> None:
    """Refuse to replace anything.

    Raises:
        UserError: One of the output files exists.
    """
    for path in output_paths(prefix).values():
        if path.exists() or path.is_symlink():
            raise UserError(f"output {path} exists; use --overwrite to replace it, or another prefix")


@contextmanager
def staging_folder(prefix: Path) -> Iterator[Path]:
    """Make the folder that the output files are written in, and remove it at the end, whatever happens.

    Raises:
        UserError: Another process is writing the same corpus right now.
        OSError: The destination cannot be written.
    """
    folder = prefix.with_name(f".{prefix.name}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK_NAME, "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"output {prefix}: another process is writing it right now") from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, prefix: Path) -> None:
    """Move the finished files from the staging folder into place.

    The index goes first out and last but one in: at no moment does a pair of .bin and .idx exist whose
    halves do not belong together. Index caches that Megatron keeps for this prefix are removed, because it
    looks them up by path and would read the new corpus with the old one's document table.
    """
    targets = output_paths(prefix)
    for suffix in targets:
        with open(folder / f"{prefix.name}.{suffix}", "rb") as file:
            os.fsync(file.fileno())
    targets["json"].unlink(missing_ok=True)
    targets["idx"].unlink(missing_ok=True)
    shutil.rmtree(prefix / "cache" / "GPTDataset_indices", ignore_errors=True)
    for suffix in ("bin", "idx", "json"):
        os.replace(folder / f"{prefix.name}.{suffix}", targets[suffix])


def write_sidecar(path: Path, content: dict[str, Any]) -> None:
    """Write the JSON file that describes a corpus."""
    text = json.dumps({"format": SIDECAR_FORMAT, **content}, indent=2)
    path.write_text(text + "\n", encoding="ascii")


def read_sidecar(prefix: str | Path) -> dict[str, Any]:
    """Return the content of PREFIX.json.

    Raises:
        UserError: The file is missing or was not written by `data prepare`.
    """
    path = output_paths(Path(prefix))["json"]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; make it with: megatron-ext data prepare") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); delete it and make the corpus again") from error
    if not isinstance(content, dict) or content.get("format") != SIDECAR_FORMAT:
        raise UserError(f"{path}: not written by this release's data prepare; make the corpus again")
    return content


def why_not_reusable(prefix: Path, wanted: dict[str, Any]) -> str | None:
    """Compare an existing corpus with what would be made now.

    Args:
        prefix: The corpus.
        wanted: Keys and values that PREFIX.json must hold; nested dictionaries are compared key by key.

    Returns:
        None if the corpus is complete and the same; otherwise what differs.
    """
    try:
        found = read_sidecar(prefix)
    except UserError as error:
        return str(error)
    difference = _first_difference(wanted, found)
    if difference is not None:
        return difference
    sizes = found.get("output_bytes", {})
    for suffix in ("bin", "idx"):
        path = output_paths(prefix)[suffix]
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != sizes.get(suffix):
            return f"{path} has {path.stat().st_size} bytes, not {sizes.get(suffix)}"
    return None


def _first_difference(wanted: dict[str, Any], found: dict[str, Any], prefix: str = "") -> str | None:
    for key, value in wanted.items():
        other = found.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            nested = _first_difference(value, other, f"{prefix}{key}.")
            if nested is not None:
                return nested
        elif value != other:
            return f"{prefix}{key} was {other!r} and is now {value!r}"
    return None
