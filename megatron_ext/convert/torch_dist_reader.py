# SPDX-License-Identifier: Apache-2.0
"""Reads a Megatron model's tensors out of a torch_dist checkpoint, whatever layout wrote it.

Megatron stacks the layers of a model whose layers are all alike, and the experts of a layer, into one tensor each; here
a tensor has its global name (`megatron_ext.params`), and a read takes the place of it alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_ext.errors import UserError
from megatron_ext.params.parameter_names import FUSED_NORMS, split_global_name, split_prediction_name

__all__ = ["TorchDistReader", "key_candidates"]


_OF_A_MODEL = ("embedding.", "decoder.", "output_layer.", "mtp.")
"""How the keys of a model's tensors begin, and no others."""


def key_candidates(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the keys under which a checkpoint may have a tensor, each with its place in the stack that the key is.

    Args:
        name: the tensor's global name.
    """
    layer, expert, leaf = split_global_name(name)
    depth = None
    if layer is None:
        depth, expert, leaf = split_prediction_name(name)
        if ".mtp_model_layer." not in name:
            yield name, ()
            return
    place: tuple[int, ...] = ()
    if expert is not None:
        place, leaf = (expert,), f"mlp.experts.experts.{leaf}"
    fused = [other + leaf.removeprefix(norm) for other, norm in FUSED_NORMS.items() if leaf.startswith(norm)]
    for candidate in (leaf, *fused):
        if layer is None:
            yield f"mtp.layers.{depth}.transformer_layer.{candidate}", place  # its former name
            continue
        yield f"decoder.layers.{candidate}", (layer, *place)
        yield f"decoder.layers.{layer}.{candidate}", place


class TorchDistReader:
    """A folder ``iter_0001000`` of a checkpoint."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        """Read what the checkpoint says of its tensors.

        Args:
            folder: of one iteration.
            prefix: of the keys that are meant, where a checkpoint has several models.

        Raises:
            UserError: it is not a torch_dist checkpoint, or is damaged.
        """
        self._folder = folder
        self._prefix = prefix
        self._storage = FileSystemReader(folder)
        try:
            self._metadata = self._storage.read_metadata()
        except Exception as error:  # unpickling a damaged file raises anything
            raise UserError(f"{folder}: the checkpoint's .metadata cannot be read ({error!r})") from error
        self._check_files()
        self._storage.set_up_storage_reader(self._metadata, is_coordinator=True)

    @property
    def keys(self) -> frozenset[str]:
        """Of all that the checkpoint has, prefixes included."""
        return frozenset(self._metadata.state_dict_metadata)

    def __contains__(self, name: str) -> bool:
        """Return whether there is a tensor of that global name."""
        return self._find(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, without the axes of a stack."""
        _, entry, place = self._entry(name)
        return tuple(entry.size)[len(place) :]

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type."""
        return self._entry(name)[1].properties.dtype

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor.

        Raises:
            UserError: the checkpoint lacks it, or a file of it is missing or damaged.
        """
        key, entry, place = self._entry(name)
        size = tuple(entry.size)[len(place) :]
        box = ChunkStorageMetadata(
            offsets=torch.Size((*place, *(0 for _ in size))), sizes=torch.Size((*(1 for _ in place), *size))
        )
        out = torch.empty(box.sizes, dtype=entry.properties.dtype)
        items = create_read_items_for_chunk_list(key, entry, [box])
        if sum(math.prod(item.lengths) for item in items) != out.numel():
            raise UserError(f"{self._folder}: {name} is not whole in the checkpoint")
        try:
            self._storage.read_data(LoadPlan(items), _Into(out)).wait()
        except Exception as error:  # whatever reading a damaged file raises
            raise UserError(f"{self._folder}: {name} cannot be read ({error!r})") from error
        return out.reshape(size)

    def unknown(self, known: frozenset[str]) -> list[str]:
        """Return what else of the model there is, beside tensors of these global names."""
        keys = {f"{self._prefix}{key}" for name in known for key, _ in key_candidates(name)}
        model = tuple(self._prefix + start for start in _OF_A_MODEL)
        return sorted(
            key
            for key, entry in self._metadata.state_dict_metadata.items()
            if key.startswith(model) and isinstance(entry, TensorStorageMetadata) and key not in keys
        )

    def _check_files(self) -> None:
        """Check that the files are there and as long as the checkpoint says."""
        ends: dict[str, int] = {}
        for stored in self._metadata.storage_data.values():
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
        for name, end in sorted(ends.items()):
            file = self._folder / name
            size = file.stat().st_size if file.exists() else None
            if size is None or size < end:
                found = "is missing" if size is None else f"has {size} bytes instead of {end}"
                raise UserError(f"{file}: the checkpoint's file {found}; copy it again")

    def _find(self, name: str) -> tuple[str, TensorStorageMetadata, tuple[int, ...]] | None:
        """A tensor's key, what the checkpoint says of it, and its place in the stack."""
        for candidate, place in key_candidates(name):
            key = self._prefix + candidate
            entry = self._metadata.state_dict_metadata.get(key)
            if isinstance(entry, TensorStorageMetadata):
                return key, entry, place
        return None

    def _entry(self, name: str) -> tuple[str, TensorStorageMetadata, tuple[int, ...]]:
        found = self._find(name)
        if found is None:
            raise UserError(f"{self._folder}: the checkpoint lacks {self._prefix}{name}")
        return found


class _Into(LoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, out: torch.Tensor) -> None:
        self._out = out

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        out = self._out
        for axis, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            out = out.narrow(axis, begin, length)
        return out

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """All is in place already."""
