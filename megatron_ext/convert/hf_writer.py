# SPDX-License-Identifier: Apache-2.0
"""Writes a Hugging Face model's folder, file by file; a run that was cut off resumes after the last whole file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_ext.convert.hf_names import HfTensor
from megatron_ext.convert.packages import safetensors

__all__ = ["file_names", "grouped", "write_weights"]

_INDEX = "model.safetensors.index.json"

Values = Callable[[HfTensor], torch.Tensor]
"""Returns a tensor's value, of its shape and the file's type."""


def grouped(tensors: Sequence[HfTensor], itemsize: int, limit: int) -> list[list[HfTensor]]:
    """Return which tensors go into one file each, in order.

    Args:
        tensors: all of the model.
        itemsize: bytes of an element.
        limit: bytes that a file should not exceed; a larger tensor has a file of its own.
    """
    groups: list[list[HfTensor]] = [[]]
    size = 0
    for tensor in tensors:
        nbytes = tensor.numel * itemsize
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += nbytes
    return groups


def file_names(count: int) -> list[str]:
    """Return the names that files have when there are `count`, as Hugging Face's libraries expect them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_weights(folder: Path, groups: Sequence[Sequence[HfTensor]], values: Values, itemsize: int) -> None:
    """Write the weights that are not there yet, and the index.

    Args:
        folder: of the model; it exists. A file in it that has its name is whole.
        groups: which tensors go into which file.
        values: what they are.
        itemsize: bytes of an element.
    """
    names = file_names(len(groups))
    for name, group in zip(names, groups, strict=True):
        if (folder / name).exists():
            continue
        partial = folder / f"{name}.partial"
        safetensors("torch").save_file(
            {tensor.name: values(tensor).contiguous() for tensor in group}, partial, metadata={"format": "pt"}
        )
        _sync(partial)
        partial.rename(folder / name)
    if len(groups) > 1:
        files = {
            tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group
        }
        total = sum(tensor.numel for group in groups for tensor in group)
        write_json(
            folder / _INDEX,
            {"metadata": {"total_parameters": total, "total_size": total * itemsize}, "weight_map": files},
        )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file for people to read, too."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
