# SPDX-License-Identifier: Apache-2.0
"""Strategies in a YAML file, which can say more about each than three numbers."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.hot_switch.strategies.strategy import Strategy
from megatron_ext.hot_switch.strategies.strategy_list import StrategyList, check_strategies
from megatron_ext.params import GptShape
from megatron_ext.yaml_file import read_yaml

__all__ = ["read_strategy_file"]

_TYPES: dict[str, type] = {"sequence_parallel": bool, "recompute": str, "stage_layers": list}
"""Fields of a strategy that are not integers."""

_WORDS = {int: "a whole number", bool: "true or false", str: "a word", list: "a list of whole numbers"}


def read_strategy_file(
    path: Path,
    *,
    world_size: int | None = None,
    whose_ranks: str = "the job",
    seq_length: int | None = None,
    shape: GptShape | None = None,
) -> StrategyList:
    """Read strategies and bucket sizes from a YAML file and check them.

    The file is a mapping with `strategies`, a list of mappings from the fields of `Strategy` to their values, home
    first and the guests shortest bucket first; and, if wanted, `bucket_sizes`, a list of token counts that descends
    to 0.

    Args:
        path: the file.
        world_size: as for `check_strategies`.
        whose_ranks: as for `check_strategies`.
        seq_length: as for `check_strategies`.
        shape: as for `check_strategies`.

    Raises:
        UserError: the file cannot be read, or with all problems of its content and their fixes.
    """
    content = read_yaml(path)
    if not isinstance(content, dict) or not isinstance(content.get("strategies"), list):
        raise UserError(
            f"{path}: there is no list 'strategies'; write one entry such as {{dp: 1, tp: 4, pp: 2}} per strategy"
        )
    problems = [
        f"{path}: '{key}' is not known; use 'strategies' and 'bucket_sizes'"
        for key in content
        if key not in ("strategies", "bucket_sizes")
    ]
    strategies = [
        _strategy(entry, f"{path}, strategy {number}", problems)
        for number, entry in enumerate(content["strategies"], 1)
    ]
    sizes = content.get("bucket_sizes")
    if sizes is not None and not (isinstance(sizes, list) and all(type(size) is int for size in sizes)):
        problems.append(f"{path}: bucket_sizes must be a list of whole numbers such as [16384, 4096, 0]")
        sizes = None
    return check_strategies(
        strategies,
        sizes,
        world_size=world_size,
        whose_ranks=whose_ranks,
        seq_length=seq_length,
        shape=shape,
        problems=problems,
    )


def _strategy(entry: Any, where: str, problems: list[str]) -> Strategy | None:
    if not isinstance(entry, dict):
        problems.append(f"{where}: '{entry}' is not a mapping; write it as {{dp: 1, tp: 4, pp: 2}}")
        return None
    known = {field.name: field for field in fields(Strategy)}
    complaints = [
        f"{where}: '{name}' is not a field of a strategy; use {', '.join(known)}" for name in entry if name not in known
    ]
    complaints += [
        f"{where}: {name} is missing; give it"
        for name, field in known.items()
        if field.default is MISSING and name not in entry
    ]
    for name, value in entry.items():
        wanted = _TYPES.get(name, int)
        # A bool is an int to isinstance, but no size.
        fits = type(value) is wanted and all(type(each) is int for each in (value if isinstance(value, list) else ()))
        if name in known and not fits:
            complaints.append(f"{where}: {name} is {value!r}; it must be {_WORDS[wanted]}")
    problems += complaints
    if complaints:
        return None
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    return Strategy(**values)
