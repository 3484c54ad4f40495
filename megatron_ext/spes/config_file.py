# SPDX-License-Identifier: Apache-2.0
"""The configuration of a SPES peer in YAML, as the paper's README writes it.

using_spes: true
spes_config:
  num_peers: 4
  peer_id: 0
  num_train_experts_per_node: 2
  sync_steps: 100
  server_addr: 127.0.0.1:50051
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError, combine
from megatron_ext.spes.config import SpesConfig
from megatron_ext.yaml_file import read_yaml

__all__ = ["read_spes_config"]

_ON_TOP = ("using_spes", "using_dilico")
_TYPES: dict[str, type] = {"using_decayed_aux_loss": bool, "quant_non_local_trainable_experts": bool}
"""Keys of `spes_config` that are not whole numbers or what `_lists` makes of them."""
_WORDS = {int: "a whole number", bool: "true or false", str: "a word"}


def read_spes_config(path: Path) -> SpesConfig:
    """Read a configuration and check it by itself.

    Args:
        path: the YAML file.

    Raises:
        UserError: the file cannot be read, or with all problems of its content and their fixes.
    """
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a mapping with using_spes and spes_config")
    inner = content.get("spes_config", {})
    if not isinstance(inner, dict):
        raise UserError(f"{path}: spes_config must be a mapping from keys to values")
    known = tuple(entry.name for entry in fields(SpesConfig) if entry.name not in _ON_TOP)
    problems = [
        f"key {key!r} is unknown; the keys are {', '.join((*_ON_TOP, 'spes_config'))}"
        for key in content
        if key not in (*_ON_TOP, "spes_config")
    ]
    problems += [
        f"spes_config: key {key!r} is unknown; the keys are {', '.join(known)}" for key in inner if key not in known
    ]
    values: dict[str, Any] = {}
    for key, value in [*((key, content[key]) for key in _ON_TOP if key in content), *inner.items()]:
        if key not in (*_ON_TOP, *known) or (value is None and key not in _ON_TOP):
            continue
        try:
            values[key] = _value(key, value)
        except ValueError as error:
            problems.append(f"{key} is {value!r}; it must be {error}")
    if not problems:
        problems += SpesConfig(**values).problems()
    if problems:
        raise combine(problems, str(path))
    return SpesConfig(**values)


def _value(key: str, value: Any) -> Any:
    """Return the value of a key.

    Raises:
        ValueError: it is of another type; says in words what it must be.
    """
    if key == "experts_per_peer":
        return _numbers(value, "a list of whole numbers")
    if key == "expert_owners":
        wanted = "a list with the owners of every expert, such as [0, [0, 1], 1], or a mapping from experts to them"
        if isinstance(value, dict) and sorted(value, key=str) != sorted(range(len(value)), key=str):
            raise ValueError(f"{wanted}; a mapping must name the experts 0 to {len(value) - 1}")
        entries = [value[expert] for expert in range(len(value))] if isinstance(value, dict) else value
        if not isinstance(entries, list):
            raise ValueError(wanted)
        return tuple(_numbers([entry] if type(entry) is int else entry, wanted) for entry in entries)
    if key == "expert_assignment":
        if value not in ("contiguous", "interleaved"):
            raise ValueError("contiguous or interleaved")
        return value
    wanted_type = bool if key in _ON_TOP else str if key == "server_addr" else _TYPES.get(key, int)
    # A bool is an int to isinstance, but no number of peers.
    if type(value) is not wanted_type:
        raise ValueError(_WORDS[wanted_type])
    return value


def _numbers(value: Any, wanted: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise ValueError(wanted)
    return tuple(value)
