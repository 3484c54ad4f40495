# SPDX-License-Identifier: Apache-2.0
"""Which files a run trains on, and in which shares, by Megatron's options on data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.data.corpus_files import check_corpus, check_split
from megatron_ext.data.split import MEGATRONS_SPLIT
from megatron_ext.errors import UserError
from megatron_ext.phrases import as_option

__all__ = ["Corpora", "check_corpora", "training_corpora"]

_ALL = "1"
"""A split that gives everything to training."""


@dataclass(frozen=True, kw_only=True)
class Corpora:
    """What a run trains on."""

    prefixes: tuple[str, ...]
    """Paths of .bin/.idx pairs without .bin and .idx."""

    weights: tuple[float, ...] | None
    """Share of each in the trained tokens, to be divided by their sum; None where all are read as one corpus."""

    split: str
    """Megatron's --split, whose first part is for training."""

    option: str
    """What names them, for messages."""


def training_corpora(args: Any) -> Corpora:
    """Return the corpora for training that Megatron's arguments name.

    Args:
        args: Megatron's arguments as parsed, without --mock-data.

    Raises:
        UserError: none is named, twice is, or a file that lists them cannot be read.
    """
    per_split = [name for name in ("train_data_path", "per_split_data_args_path") if getattr(args, name) is not None]
    whole = [name for name in ("data_path", "data_args_path") if getattr(args, name) is not None]
    named = whole or per_split
    if len(named) != 1 or (whole and per_split):
        given = ", ".join(as_option(name) for name in (*whole, *per_split)) or "none"
        raise UserError(
            "the data for training are named by one of --data-path, --data-args-path, --train-data-path and "
            f"--per-split-data-args-path, but there is {given}; give one of them"
        )
    option = as_option(named[0])
    prefixes, weights = _blend(_words(named[0], getattr(args, named[0]), option), option)
    split = (args.split or MEGATRONS_SPLIT) if whole else _ALL
    return Corpora(prefixes=prefixes, weights=weights, split=split, option=option)


def check_corpora(corpora: Corpora) -> list[str]:
    """Return the problems of the files, one sentence each, told from a few bytes of them."""
    problems = []
    for prefix in corpora.prefixes:
        try:
            check_corpus(prefix, option=corpora.option)
            if corpora.split != _ALL:
                check_split(prefix, corpora.split)
        except UserError as error:
            problems.append(str(error))
    return problems


def _words(name: str, given: Any, option: str) -> Sequence[str]:
    """Return weights and prefixes as the command line, or the file that it names, lists them."""
    if name in ("data_path", "train_data_path"):
        return [str(word) for word in given]
    try:
        text = Path(given).read_text(encoding="utf-8")
        if name == "data_args_path":
            return text.split()
        listed = json.loads(text)["train"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{option} {given}: cannot be read ({error}); give a file that lists the corpora") from None
    except (KeyError, TypeError):
        raise UserError(f"{option} {given}: has no entry 'train'; give a mapping of train, valid and test") from None
    return listed.split() if isinstance(listed, str) else [str(word) for word in listed or ()]


def _blend(words: Sequence[str], option: str) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """Read words as Megatron does: prefixes, or an even number of weights and prefixes by turns."""
    numbers = [_number(word) for word in words[::2]]
    if not words:
        raise UserError(f"{option} names no corpus; give the prefix of a .bin/.idx pair")
    if len(words) % 2 or all(number is None for number in numbers):
        return tuple(word.strip() for word in words), None
    weights = tuple(number for number in numbers if number is not None)
    if len(weights) < len(numbers) or min(weights) <= 0 or not sum(weights) < float("inf"):
        raise UserError(
            f"{option} {' '.join(words)}: a weight is missing, or not above 0; write 30 one 70 other, or prefixes alone"
        )
    return tuple(word.strip() for word in words[1::2]), weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
