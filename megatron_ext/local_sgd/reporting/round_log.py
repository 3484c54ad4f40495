# SPDX-License-Identifier: Apache-2.0
"""The file in which every outer round leaves a line of JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError

__all__ = ["FILE_NAME", "append_round", "mean_weights", "read_rounds", "sending_seconds"]

FILE_NAME = "local_sgd_rounds.jsonl"


def append_round(path: Path, entry: dict[str, Any]) -> None:
    """Append one line; what stands there already is never touched.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(max(file.tell() - 1, 0))
        # The last line of a run that was killed while it wrote has no end.
        cut = file.read(1) not in (b"", b"\n")
        file.write((b"\n" if cut else b"") + json.dumps(_standard(entry), allow_nan=False).encode() + b"\n")


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """Return the rounds of a run in order.

    A run that was resumed from before its end has made some rounds twice; the last one of a number counts, and
    nothing after it that was written before it.

    Args:
        path: the file, or the folder that holds it under its usual name.

    Raises:
        UserError: there is no such file, or it is not a round log.
    """
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"{file}: no such file; give the --save folder of a run with local SGD, or its --local-sgd-round-log"
        )
    rounds: list[dict[str, Any]] = []
    for entry in _entries(file):
        while rounds and rounds[-1]["round"] >= entry["round"]:
            rounds.pop()
        rounds.append(entry)
    if not rounds:
        raise UserError(f"{file}: no line in it is one that an outer round has left")
    return rounds


def sending_seconds(entry: dict[str, Any]) -> float:
    """Return what of a round's time was exchange."""
    return max(float(entry["seconds"] - entry["waiting_seconds"] - entry["applying_seconds"]), 0.0)


def mean_weights(entry: dict[str, Any]) -> list[float]:
    """Return each worker's weight in a round, as the mean over its units; nothing for a plain mean."""
    return [math.fsum(weights) / len(weights) for weights in zip(*entry["weights"].values(), strict=True)]


def as_number(value: float | None) -> float:
    """Return a number of a round: NaN for a non-finite one."""
    return math.nan if value is None else float(value)


def _standard(value: Any) -> Any:
    """Return what JSON can hold: null for non-finite numbers, which readers in other languages refuse."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _standard(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_standard(item) for item in value]
    return value


def _entries(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that are whole; a run that was killed while it wrote leaves half a line."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("round"), int) and "iteration" in entry:
            yield entry
