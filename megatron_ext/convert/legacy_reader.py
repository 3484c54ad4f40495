# SPDX-License-Identifier: Apache-2.0
"""Reads a Megatron model's tensors out of a checkpoint in the legacy format, a file for every rank of a layout.

The files are mapped, so that a read takes the parts of one tensor alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_ext.convert.settings import ModelSettings
from megatron_ext.errors import UserError
from megatron_ext.legacy_format.legacy_folder import RANK_FILE, rank_folders
from megatron_ext.params import Coordinates, Layout, Placed, Placement, global_name, put

__all__ = ["LegacyFiles", "LegacyReader"]

_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class LegacyFiles:
    """The files of one iteration, and what the first one says of the job."""

    def __init__(self, folder: Path) -> None:
        """Open the files.

        Raises:
            UserError: one is missing, damaged or not of a layout that is known.
        """
        self.folder = folder
        first = min(rank_folders(folder)) / RANK_FILE
        args = _opened(first).get("args")
        if args is None:
            raise UserError(f"{first}: the checkpoint has no arguments; it was not written by Megatron's training")
        self.args: Any = args
        self.tp, self.pp, self.ep = (
            int(getattr(self.args, f"{name}_model_parallel_size", None) or 1)
            for name in ("tensor", "pipeline", "expert")
        )
        if (getattr(self.args, "expert_tensor_parallel_size", None) or self.tp) != self.tp:
            raise UserError(
                f"{folder}: --expert-tensor-parallel-size differs from --tensor-model-parallel-size, and the legacy "
                "format does not say whose experts a file has; load it without --ckpt-format torch, and save"
            )
        self.paths = {
            (tensor, stage, expert): self._path(tensor, stage, expert)
            for tensor in range(self.tp)
            for stage in range(self.pp)
            for expert in range(self.ep)
        }
        self.chunks = {place: _chunks(path) for place, path in self.paths.items()}

    def _path(self, tensor: int, stage: int, expert: int) -> Path:
        name = f"mp_rank_{tensor:02d}"
        name += f"_{stage:03d}" if self.pp > 1 else ""
        name += f"_{expert:03d}" if self.ep > 1 else ""
        return self.folder / name / RANK_FILE


class LegacyReader:
    """The model in the files, by global names."""

    def __init__(self, files: LegacyFiles, settings: ModelSettings) -> None:
        """Work out which rank has which part of which tensor.

        Args:
            files: those of the iteration.
            settings: the model that their arguments describe, all of it.

        Raises:
            UserError: the files do not have the layers of the model.
        """
        self._files = files
        counts = [
            len({match[1] for name in files.chunks[0, stage, 0][chunk] if (match := _LAYER.match(name))})
            for chunk in range(len(files.chunks[0, 0, 0]))
            for stage in range(files.pp)
        ]
        layout = Layout(
            tp=files.tp,
            pp=files.pp,
            vpp=len(counts) // files.pp,
            ep=files.ep,
            dp=files.ep,
            layers_per_chunk=tuple(counts),
        )
        shape = replace(settings.shape(), padded_vocab_size=files.args.padded_vocab_size, vocab_size=None)
        if shape.latent_attention is not None:
            cut = files.args.transformer_impl == "local"
            shape = replace(shape, latent_attention=replace(shape.latent_attention, cut_down_projections=cut))
        self._placement = Placement(shape, layout)
        self._held = {
            place: [
                {
                    global_name(
                        name,
                        first_layer=self._placement.chunk_layers[number * files.pp + place[1]].start,
                        first_expert=place[2] * self._placement.experts_per_rank,
                    ): value
                    for name, value in chunk.items()
                }
                for number, chunk in enumerate(chunks)
            ]
            for place, chunks in files.chunks.items()
        }
        self._names = {name for chunks in self._held.values() for chunk in chunks for name in chunk}

    def __contains__(self, name: str) -> bool:
        """Return whether there is a tensor of that global name."""
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._placement.by_name[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type."""
        return next(self._parts(name))[1].dtype

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor.

        Raises:
            UserError: a file lacks its part, or has one of another shape.
        """
        out = torch.empty(self.shape(name), dtype=self.dtype(name))
        for place, part in self._parts(name):
            put(part, place.slice, out)
        return out

    def unknown(self, known: frozenset[str]) -> list[str]:
        """Return what else of a model there is, beside tensors of these global names."""
        copies = {copy for tensor in self._placement.tensors for copy in tensor.shared_with}
        return sorted(self._names - known - copies)

    def _parts(self, name: str) -> Iterator[tuple[Placed, torch.Tensor]]:
        """Yield each rank's part of a tensor, and where it belongs."""
        tensor = self._placement.by_name[name]
        stage, _ = self._placement.stages_of(tensor)[0]
        chunk, pipeline = divmod(stage, self._files.pp)
        expert = self._placement.expert_rank(tensor) or 0
        for rank in range(self._files.tp if tensor.split is not None else 1):
            place = Coordinates(tp=rank, etp=rank, pp=pipeline, ep=expert)
            placed = next(held for held in self._placement.on_chunk(place, chunk) if held.tensor is tensor)
            path = self._files.paths[rank, pipeline, expert]
            part = self._held[rank, pipeline, expert][chunk].get(name)
            if part is None or tuple(part.shape) != placed.slice.local_shape:
                found = "lacks it" if part is None else f"has a part of shape {tuple(part.shape)}"
                raise UserError(f"{path}: {name}: the file {found}, and its arguments say {placed.slice.local_shape}")
            yield placed, part


def _opened(path: Path) -> Mapping[str, Any]:
    """A file's content, its tensors mapped. Megatron's arguments are Python objects, which only pickle reads."""
    try:
        content: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    except Exception as error:  # whatever unpickling damaged bytes raises
        raise UserError(f"{path}: the checkpoint's file is missing or cannot be read ({error!r})") from error
    return content


def _chunks(path: Path) -> list[dict[str, torch.Tensor]]:
    """The tensors of a rank's model, one chunk after the other."""
    content = _opened(path)
    names = ["model"] if "model" in content else sorted(name for name in content if re.fullmatch(r"model\d+", name))
    if not names:
        raise UserError(
            f"{path}: no model is in it, as in the middle of an interval of local SGD; give an iteration at a "
            "synchronisation, or load it in the run that wrote it without --ckpt-format torch, and save"
        )
    return [{key: value for key, value in content[name].items() if isinstance(value, torch.Tensor)} for name in names]
