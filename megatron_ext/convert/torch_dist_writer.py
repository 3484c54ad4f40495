# SPDX-License-Identifier: Apache-2.0
"""Writes a model as a torch_dist checkpoint that stock Megatron loads, one tensor in memory at a time.

A run that was cut off resumes after the last whole file.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ext.convert.torch_dist_reader import key_candidates
from megatron_ext.convert.whole_folder import system_errors
from megatron_ext.params import GlobalTensor, GptShape, gpt_parameters

__all__ = ["FILE_BYTES", "write_checkpoint"]

FILE_BYTES = 4 << 30
"""A file is closed when it has as much."""

_LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "linear_q_", "linear_kv_", "eh_proj")

Values = Callable[[GlobalTensor], torch.Tensor]
"""Returns a tensor's value, of its shape and type."""


def write_checkpoint(
    folder: Path,
    shape: GptShape,
    values: Values,
    args: Namespace,
    *,
    homogeneous: bool,
    common_beside: bool,
) -> None:
    """Write a checkpoint of one iteration.

    Args:
        folder: where. What an earlier call with the same arguments has written there, and says to be whole, stays.
        shape: the model, whose `dtype` is that of the file.
        values: what its tensors are.
        args: the arguments that Megatron is to find in it.
        homogeneous: whether the layers are stacked, as Megatron does where all are alike.
        common_beside: whether what is neither tensor nor state of a layer is in a file beside, as up to Megatron 0.18.
    """
    folder.mkdir(parents=True, exist_ok=True)
    common = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
    entries = list(_entries(shape, homogeneous))
    if common_beside:
        with system_errors(RuntimeError):
            torch.save(common, folder / "common.pt")
    else:
        entries.append(_Entry("common_state/shard_0_1", (), (), None, common))
    plans = _plans(entries)
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    writer.set_up_storage_writer(is_coordinator=True)
    planner = _Planner(values, entries)
    written = []
    records = [folder / f"file_{number}.written" for number in range(len(plans))]
    for record, plan in zip(records, writer.prepare_global_plan(plans), strict=True):
        if not record.exists():
            with system_errors(RuntimeError):
                results = writer.write_data(plan, planner).wait()
            _note(record, results)
        read: list[WriteResult] = pickle.loads(record.read_bytes())
        written.append(read)
    writer.finish(Metadata(_described(entries)), written)
    for record in records:
        record.unlink()
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}), encoding="utf-8"
    )


def _note(record: Path, results: list[WriteResult]) -> None:
    """Note that a file is whole, and what is where in it."""
    partial = record.with_suffix(".partial")
    with partial.open("wb") as file:
        pickle.dump(results, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(record)


@dataclass(frozen=True)
class _Entry:
    """What a checkpoint has under a key: a tensor, one of a stack, or an object."""

    key: str
    """In the checkpoint."""

    place: tuple[int, ...]
    """Its place in the stack."""

    stack: tuple[int, ...]
    """The stack's sizes."""

    tensor: GlobalTensor | None
    """The tensor; None for an object."""

    content: Any = None
    """The object; None for state of a layer that has none."""

    @property
    def index(self) -> MetadataIndex:
        """By which the planner, the metadata and the files know it."""
        return MetadataIndex(self.key) if self.tensor is None else MetadataIndex(self.key, self.chunk.offsets)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The part of the stack that it is."""
        assert self.tensor is not None
        shape = self.tensor.shape
        return ChunkStorageMetadata(
            offsets=torch.Size((*self.place, *(0 for _ in shape))),
            sizes=torch.Size((*(1 for _ in self.place), *shape)),
        )

    @property
    def size(self) -> torch.Size:
        """The whole stack's."""
        assert self.tensor is not None
        return torch.Size((*self.stack, *self.tensor.shape))

    @property
    def nbytes(self) -> int:
        """In the file, about."""
        return 0 if self.tensor is None else self.tensor.numel * self.tensor.dtype.itemsize

    def item(self) -> WriteItem:
        """Return what a plan of torch's writer has for it."""
        if self.tensor is None:
            return WriteItem(index=self.index, type=WriteItemType.BYTE_IO)
        data = TensorWriteData(
            chunk=self.chunk, properties=TensorProperties(dtype=self.tensor.dtype), size=self.size
        )
        return WriteItem(index=self.index, type=WriteItemType.SHARD, tensor_data=data)


def _entries(shape: GptShape, homogeneous: bool) -> Iterator[_Entry]:
    """Everything that a checkpoint of the model has, in the order of the model.

    A norm is there under all names that a layer implementation may look for it: its few values cost nothing.
    """
    experts = shape.num_moe_experts or 0
    for tensor in gpt_parameters(shape):
        for key, place in key_candidates(tensor.name):
            # With a layer's number in the key, the layers are not stacked.
            if tensor.layer is not None and (f"decoder.layers.{tensor.layer}." in key) == homogeneous:
                continue
            layers = (shape.num_layers,) if homogeneous and tensor.layer is not None else ()
            stack = (*layers, *((experts,) if tensor.is_expert else ()))
            yield _Entry(key, place, stack, tensor)
            module, _, kind = key.rpartition(".")
            if kind == "weight" and module.rpartition(".")[2].startswith(_LINEAR):
                at, of = (".".join(map(str, numbers)) for numbers in (place or (0,), stack or (1,)))
                yield _Entry(f"{module}._extra_state/shard_{at}_{of}", (), (), None)


def _described(entries: list[_Entry]) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
    """What the checkpoint says of its keys."""
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for entry in entries:
        if entry.tensor is None:
            found[entry.key] = BytesStorageMetadata()
            continue
        stacked = found.setdefault(
            entry.key,
            TensorStorageMetadata(
                properties=TensorProperties(dtype=entry.tensor.dtype), size=entry.size, chunks=[]
            ),
        )
        assert isinstance(stacked, TensorStorageMetadata)
        stacked.chunks.append(entry.chunk)
    return found


def _plans(entries: list[_Entry]) -> list[SavePlan]:
    """One plan per file."""
    plans: list[list[WriteItem]] = [[]]
    size = 0
    for entry in entries:
        if size >= FILE_BYTES:
            plans.append([])
            size = 0
        plans[-1].append(entry.item())
        size += entry.nbytes
    return [SavePlan(items) for items in plans]


class _Planner(SavePlanner):
    """Hands torch's writer the values as it comes to them."""

    def __init__(self, values: Values, entries: list[_Entry]) -> None:
        self._values = values
        self._entries = {entry.index: entry for entry in entries}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> SavePlan:
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        raise NotImplementedError

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        entry = self._entries[write_item.index]
        if entry.tensor is None:
            state = io.BytesIO()
            torch.save([entry.content], state)
            return state
        return self._values(entry.tensor).reshape(entry.chunk.sizes)
