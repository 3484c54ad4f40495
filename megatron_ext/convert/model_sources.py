# SPDX-License-Identifier: Apache-2.0
"""Where a model's tensors come from on the way to Hugging Face: a checkpoint of a job, or a snapshot of a server."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from megatron_ext.convert.torch_dist_reader import TorchDistReader
from megatron_ext.errors import UserError
from megatron_ext.legacy_format.legacy_folder import is_legacy
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.disk.snapshot_names import newest_of, snapshot_name
from megatron_ext.sync_service.rounds.run_record import RunRecord

__all__ = [
    "Snapshots",
    "Source",
    "checkpoint_folder",
    "find_snapshots",
    "is_checkpoint",
    "open_checkpoint",
    "prediction_layers",
]

_TRACKER = "latest_checkpointed_iteration.txt"
_WORKER, _ANCHOR = "local_sgd.worker_{}.", "local_sgd.outer.anchor."


class Source(Protocol):
    """A model's tensors, by their global names."""

    def __contains__(self, name: str) -> bool:
        """Return whether there is a tensor of that name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type."""

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor."""

    def unknown(self, known: frozenset[str]) -> list[str]:
        """Return what else of a model is there, beside tensors of these names."""


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, or one iteration of it."""
    return _is_iteration(path) or (path / _TRACKER).exists()


def _is_iteration(folder: Path) -> bool:
    return (folder / ".metadata").exists() or is_legacy(folder)


def checkpoint_folder(path: Path, iteration: int | None = None) -> Path:
    """Return the folder of one iteration of a checkpoint.

    Args:
        path: that folder itself, or the one that was given to --save.
        iteration: which; None for the newest.

    Raises:
        UserError: there is none.
    """
    if _is_iteration(path):
        return path
    tracker = path / _TRACKER
    if not tracker.exists():
        raise UserError(f"{path}: neither a checkpoint (no {_TRACKER}) nor one iteration of it (no .metadata)")
    if iteration is not None and iteration < 0:
        raise UserError(f"--iteration {iteration}: give one of {_iterations_in(path)}")
    said = tracker.read_bytes().decode(errors="replace").strip() if iteration is None else str(iteration)
    if said != "release" and not (said.isascii() and said.isdigit()):
        raise UserError(
            f"{tracker}: says {said[:40]!r}, not the number of an iteration; write that of a whole checkpoint into it: "
            f"{_iterations_in(path)}"
        )
    folder = path / (said if said == "release" else f"iter_{int(said):07d}")
    if not _is_iteration(folder):
        raise UserError(
            f"{folder}: not a torch_dist checkpoint, nor a legacy one; those in {path}: {_iterations_in(path)}"
        )
    return folder


def _iterations_in(path: Path) -> str:
    return ", ".join(sorted(found.name for found in path.iterdir() if _is_iteration(found))) or "none"


def prediction_layers(source: Source) -> int:
    """Return how many layers of multi-token prediction a source has."""
    return next(depth for depth in itertools.count() if f"mtp.layers.{depth}.eh_proj.weight" not in source)


def open_checkpoint(folder: Path, weights: str = "model") -> TorchDistReader:
    """Open one of the models in a checkpoint.

    Args:
        folder: of one iteration.
        weights: `model` for what stock Megatron reads; with local SGD `anchor` for the parameters last synchronised, or
            `worker:N` for those of one worker.

    Raises:
        UserError: the checkpoint does not have it.
    """
    kind, _, number = weights.partition(":")
    if kind == "model" and not number:
        prefix = ""
    elif kind == "anchor" and not number:
        prefix = _ANCHOR
    elif kind == "worker" and number.isdecimal():
        prefix = _WORKER.format(int(number))
    else:
        raise UserError(f"--weights {weights}: give model, anchor, or worker:N")
    reader = TorchDistReader(folder, prefix)
    if "embedding.word_embeddings.weight" not in reader:
        has = [name for name, start in _prefixes(reader).items() if _has_model(reader, start)]
        problem = f"{folder}: the checkpoint has no weights {weights}; it has {', '.join(has) or 'none'}"
        if weights == "model" and "anchor" in has:
            problem += (
                ": the workers differed when it was saved; take an iteration after a round, if there is one "
                "(--iteration N), or bring one of these out with convert to-hf --weights"
            )
        raise UserError(problem)
    return reader


def _prefixes(reader: TorchDistReader) -> dict[str, str]:
    start = _WORKER.partition("{")[0]
    numbers = sorted({int(key[len(start) :].partition(".")[0]) for key in reader.keys if key.startswith(start)})
    return {"model": "", "anchor": _ANCHOR, **{f"worker:{number}": _WORKER.format(number) for number in numbers}}


def _has_model(reader: TorchDistReader, prefix: str) -> bool:
    return f"{prefix}embedding.word_embeddings.weight" in reader.keys


class Snapshots:
    """One round in the folder of a sync service, or of each of its shards."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Open the files, each of which has a part of the tensors.

        Raises:
            UserError: one cannot be read.
        """
        self.files = tuple(files)
        snapshots = [Snapshot(file) for file in files]
        self._by_name = {name: snapshot for snapshot in snapshots for name in snapshot.tensors}

    def __contains__(self, name: str) -> bool:
        """Return whether there is a tensor of that name."""
        return name in self._by_name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._by_name[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type."""
        return self._by_name[name].dtype(name)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor.

        Raises:
            UserError: it is damaged, or cannot be read.
        """
        shape = self.shape(name)
        try:
            return self._by_name[name].checked(name).read(0, math.prod(shape)).view(shape)
        except OSError as error:
            raise UserError(str(error)) from error

    def unknown(self, known: frozenset[str]) -> list[str]:
        """Return what else there is, beside tensors of these names."""
        return sorted(self._by_name.keys() - known)

    def agreed(self) -> Mapping[str, str]:
        """Return what the peers of the run agreed on beside the tensors; empty where the files do not say.

        Raises:
            UserError: what they say is damaged.
        """
        for snapshot in dict.fromkeys(self._by_name.values()):
            try:
                record = RunRecord.of(snapshot)
            except OSError as error:
                raise UserError(str(error)) from error
            if record is not None:
                return record.agreed
        return {}


def find_snapshots(path: Path) -> tuple[Path, ...]:
    """Return the files of the newest round of a run at a sync service, one per shard.

    Args:
        path: one such file, a run's folder (``DIR/runs/RUN``), or the server's folder ``DIR`` if it has one run.

    Raises:
        UserError: there is none, or several runs are there.
    """
    if path.is_file():
        return (path,)
    run = _run_folder(path)
    number = newest_of(file.name for file in (run / "snapshots").glob("*"))
    if number < 0:
        raise UserError(f"{run}: no snapshot; the run has committed no round")
    server = run.parent.parent
    folders = [run, *sorted(server.glob(f"shard-*/runs/{run.name}"))]
    files = tuple(folder / "snapshots" / snapshot_name(number) for folder in folders)
    for file in files:
        if not file.exists():
            raise UserError(f"{file}: the snapshot of a shard is missing; copy it there, and try again")
    return files


def _run_folder(path: Path) -> Path:
    if (path / "snapshots").is_dir():
        return path
    runs = sorted(folder.parent for folder in path.glob("runs/*/snapshots"))
    if len(runs) != 1:
        names = ", ".join(run.name for run in runs)
        raise UserError(
            f"{path}: several runs ({names}); give the folder of one, as {runs[0]}"
            if runs
            else f"{path}: neither a checkpoint, a snapshot nor the folder of a sync service"
        )
    return runs[0]
