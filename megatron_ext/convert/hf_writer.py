# SPDX-License-Identifier: Apache-2.0
"""Writes a Hugging Face model's folder, file by file; a run that was cut off resumes after the last whole file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron_ext.convert.hf_names import HfTensor
from megatron_ext.convert.packages import safetensors
from megatron_ext.convert.whole_folder import system_errors
from megatron_ext.errors import UserError

__all__ = ["check_weights", "file_names", "grouped", "write_json", "write_weights"]

_INDEX = "model.safetensors.index.json"
_UNFINISHED = "unfinished"
"""Folder for the file that is being written: safetensors begins with one of another name, which a kill leaves."""

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
    unfinished = folder / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    for name, group in zip(names, groups, strict=True):
        if (folder / name).exists():
            continue
        file = unfinished / name
        file.touch()
        mode = file.stat().st_mode  # what the umask leaves; safetensors' own files are their owner's alone
        content = {tensor.name: values(tensor).contiguous() for tensor in group}
        with system_errors(safetensors().SafetensorError):
            safetensors("torch").save_file(content, file, metadata={"format": "pt"})
        file.chmod(mode)
        _sync(file)
        file.rename(folder / name)
    unfinished.rmdir()
    if len(groups) > 1:
        files = {
            tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group
        }
        total = sum(tensor.numel for group in groups for tensor in group)
        write_json(
            folder / _INDEX,
            {"metadata": {"total_parameters": total, "total_size": total * itemsize}, "weight_map": files},
        )


def check_weights(folder: Path, groups: Sequence[Sequence[HfTensor]]) -> None:
    """Check that the files of weights in a folder are those that `write_weights` makes of `groups`, and no others.

    Raises:
        UserError: a file is missing, is there besides, or has other tensors than the index says.
    """
    wanted = dict(zip(file_names(len(groups)), groups, strict=True))
    found = {file.name for file in folder.glob("*.safetensors*")} - {_INDEX}
    for name in sorted(wanted.keys() ^ found):
        _refuse(folder, f"{name} is {'not there' if name in wanted else 'there, and not of this model'}")
    if len(groups) == 1 and (folder / _INDEX).exists():
        _refuse(folder, f"{_INDEX} is there, and the model has one file")
    for name, group in wanted.items():
        expected = {tensor.name: tensor.shape for tensor in group}
        shapes = _shapes(folder / name)
        for key in sorted(expected.keys() | shapes.keys()):
            if expected.get(key) != shapes.get(key):
                _refuse(folder, f"{name} has {key} of {shapes.get(key)}, and {expected.get(key)} was to be written")


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safetensors().safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except safetensors().SafetensorError as error:
        _refuse(path.parent, f"{path.name} cannot be read ({error})")


def _refuse(folder: Path, problem: str) -> NoReturn:
    raise UserError(f"{folder}: {problem}; something else has changed the folder: remove it, and convert again")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file for people to read, too."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
