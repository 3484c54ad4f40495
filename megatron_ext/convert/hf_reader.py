# SPDX-License-Identifier: Apache-2.0
"""Reads a Hugging Face model's folder: its configuration, and its tensors one at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from megatron_ext.convert.hf_names import HfTensor
from megatron_ext.convert.packages import safetensors
from megatron_ext.errors import UserError

__all__ = ["HfModel", "read_json"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ROWS = 4096
"""That are compared at a time."""


class HfModel:
    """A model's folder, with weights in safetensors files."""

    def __init__(self, folder: Path) -> None:
        """Look at the folder; no tensor is read.

        Raises:
            UserError: it is not a folder of a model, or a file of its weights is missing or damaged.
        """
        self.folder = folder
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; give that of a Hugging Face model, with its config.json")
        self.config: Mapping[str, Any] = read_json(folder / "config.json")
        self._files = self._weight_map()
        self._open: dict[str, Any] = {}

    @property
    def files(self) -> tuple[Path, ...]:
        """That have the weights."""
        return tuple(self.folder / name for name in sorted(set(self._files.values())))

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type."""
        return self.rows(name, 0, 0).dtype

    def rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return rows of a tensor, as it has them."""
        found: torch.Tensor = self._slice(name)[begin:end]
        return found

    def check(self, tensors: tuple[HfTensor, ...], also: frozenset[str] = frozenset(), hint: str | None = None) -> None:
        """Check that the folder has the tensors of a model, and no others.

        Args:
            tensors: those of the model.
            also: patterns of names that may be there besides, and are not read.
            hint: what else can be done about tensors too many.

        Raises:
            UserError: one is missing, has another shape, or is not of the model; it is named.
        """
        for tensor in tensors:
            if tensor.name not in self._files:
                raise UserError(f"{self.folder}: the model lacks {tensor.name}, which its config.json asks for")
            found = self.shape(tensor.name)
            if found != tensor.shape:
                raise UserError(
                    f"{self.folder}: {tensor.name} has shape {found}, and config.json says {tensor.shape}"
                )
        known = {tensor.name for tensor in tensors}
        unknown = sorted(
            name for name in self.names - known if not any(fnmatch(name, pattern) for pattern in also)
        )
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise UserError(
                f"{self.folder}: the weights have {unknown[0]}{more}, which config.json does not ask for; "
                f"{'' if hint is None else hint + ', '}--ignore PATTERN leaves tensors out"
            )

    def check_equal(self, copy: str, name: str) -> None:
        """Check that a tensor is a copy of another one of the same shape.

        Raises:
            UserError: it is not.
        """
        rows = self.shape(name)[0]
        for begin in range(0, rows, _ROWS):
            end = min(rows, begin + _ROWS)
            if not torch.equal(self.rows(copy, begin, end), self.rows(name, begin, end)):
                raise UserError(
                    f"{self.folder}: {copy} is not equal to {name}, and in Megatron it is the same tensor; "
                    "without --mtp, --ignore leaves the layer out"
                )

    def _weight_map(self) -> dict[str, str]:
        """By name, the file that has a tensor."""
        index = self.folder / _INDEX
        if index.exists():
            files = read_json(index).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(file, str) and file for file in files.values()):
                raise UserError(f"{index}: weight_map does not say which tensor is in which file; copy the file again")
            for file in sorted(set(files.values())):
                if not (self.folder / file).exists():
                    raise UserError(f"{self.folder / file}: the file is missing, and {_INDEX} names it; copy it there")
            return files
        if not (self.folder / _SINGLE).exists():
            raise UserError(
                f"{self.folder}: no {_SINGLE} and no {_INDEX}; weights in other formats are not read: save the model "
                "with save_pretrained(FOLDER, safe_serialization=True)"
            )
        return dict.fromkeys(self._opened(_SINGLE).keys(), _SINGLE)

    def _slice(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = self._opened(file)
        try:
            return self._open[file].get_slice(name)
        except safetensors().SafetensorError as error:
            raise UserError(f"{self.folder / file}: {name} cannot be read ({error})") from error

    def _opened(self, file: str) -> Any:
        path = self.folder / file
        try:
            return safetensors().safe_open(path, framework="pt")
        except (safetensors().SafetensorError, OSError) as error:
            raise UserError(f"{path}: not a whole safetensors file ({error}); copy it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        UserError: there is no such file, or something else is in it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    return content
