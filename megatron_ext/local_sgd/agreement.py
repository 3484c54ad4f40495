# SPDX-License-Identifier: Apache-2.0
"""What all ranks must be told alike, checked once before anything depends on it.

Rounds are made of collectives: ranks with other settings wait for each other forever, or continue from different values
without a word. So ranks compare what they were given, and all of them refuse what differs, with the field and every
value. A problem of one rank alone is refused on all of them, too: the others would wait for it.
"""

from __future__ import annotations

import dataclasses
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron_ext.config_options import FromArgs, flag_of
from megatron_ext.errors import UserError, combine
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.outer.codecs.all_codecs import CODECS
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.optimizers.all_optimizers import OPTIMIZERS
from megatron_ext.outer.reducer_config import GTAConfig
from megatron_ext.outer.reducers.all_reducers import REDUCERS
from megatron_ext.plugins import Registry
from megatron_ext.version import __version__

__all__ = [
    "MAY_DIFFER",
    "canonical",
    "differences",
    "gather_all",
    "gather_at",
    "gather_objects",
    "held_by",
    "numbers_in_words",
    "refuse_together",
    "settings_of",
    "workers_in_words",
]

MAY_DIFFER = {
    "local_sgd_round_log": "the first rank alone writes the file; whether ranks measure for it is agreed on apart",
    "is_debug": "it decides what the first rank logs of a round, not what is done",
}
"""Fields of the configs that ranks may be given differently, each with the reason. All others must agree."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_EXACT = 2**53


def settings_of(
    config: LocalSGDConfig, outer: OuterOptimizerConfig, gta: GTAConfig, streaming: StreamingConfig
) -> dict[str, str]:
    """Return by flag, in words that are equal where the values mean the same, everything that must agree."""
    if outer.outer_optim_class is not None:
        # A class and its import path are the same choice.
        outer = dataclasses.replace(outer, outer_optim_class=outer.class_path)
    if outer.outer_optimizer_lr is None:
        outer = dataclasses.replace(outer, outer_optimizer_lr=_default_lr(outer))
    found = {"the version of megatron_ext": __version__}
    # Another version may make other values of the same messages.
    chosen: dict[str, tuple[Registry[Any], Any]] = {
        "--local-sgd-codec": (CODECS, config.codec),
        "--local-sgd-pseudo-grad-reducer": (REDUCERS, gta.reducer),
        "--outer-optimizer": (OPTIMIZERS, outer.outer_optimizer),
    }
    for flag, (registry, name) in chosen.items():
        package = registry.package_of(name) if isinstance(name, str) else None
        found[f"the package of {flag}"] = package or "megatron_ext"
    configs: tuple[FromArgs, ...] = (config, outer, gta, streaming)
    for each in configs:
        fields: dict[str, dataclasses.Field[Any]] = getattr(each, "__dataclass_fields__")  # noqa: B009  # no type says it
        for name, entry in fields.items():
            if name not in MAY_DIFFER:
                found[flag_of(entry)] = canonical(getattr(each, name))
    return found


def _default_lr(outer: OuterOptimizerConfig) -> float | None:
    """Return the learning rate that is in force where none is given, or where none has an effect that of sgd."""
    try:
        rate = outer.learning_rate
    except (UserError, TypeError, ValueError, AttributeError):  # what is bad about it is said elsewhere
        rate = None
    return OuterOptimizerConfig().learning_rate if rate is None else rate


def canonical(value: Any) -> str:
    """Return a value in words that are the same in every process, and for equal numbers of different types."""
    if value is None:
        return "not given"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Mapping):
        entries = sorted((str(name), canonical(entry)) for name, entry in value.items())
        return "{" + ", ".join(f"{name}: {entry}" for name, entry in entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(canonical, value)) + "]"
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return repr(int(value))
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = float(value)
        return repr(int(number)) if number.is_integer() and abs(number) < _EXACT else repr(number)
    return _ADDRESS.sub("", repr(value))


def differences(
    described: Sequence[Mapping[str, str]],
    who: Callable[[Sequence[int]], str],
    alike: str = "give all of them the same",
) -> list[str]:
    """Return what differs among descriptions, one sentence per name.

    Args:
        described: values by name, of every rank.
        who: returns in words which ranks those of some indices into `described` are.
        alike: what to do about it.
    """
    found = []
    for name in dict.fromkeys(name for each in described for name in each):
        values = [each.get(name, "missing") for each in described]
        if len(set(values)) > 1:
            found.append(f"{name} is {held_by(values, who)}; {alike}")
    return found


def held_by(values: Sequence[Any], who: Callable[[Sequence[int]], str]) -> str:
    """Return in words which of different values are whose: '0.7 on workers 0, 2 and 0.5 on worker 1'.

    Args:
        values: of every rank.
        who: returns in words which ranks those of some indices are.
    """
    holders: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        holders.setdefault(value, []).append(index)
    said = [f"{value} on {who(indices)}" for value, indices in holders.items()]
    return f"{', '.join(said[:-1])} and {said[-1]}"


def gather_objects(mine: Any, group: Any) -> list[Any]:
    """Return what every rank of a group brought, in their order; all of them must call it.

    Args:
        mine: any object that can be pickled.
        group: the process group.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def gather_all(mine: Any, across: Any, inside: Any) -> list[list[Any]]:
    """Return what every rank brought, by worker and rank of the worker; all ranks must call it.

    Args:
        mine: any object that can be pickled.
        across: process group of the ranks that hold the same values, one per worker, in worker order.
        inside: process group of all ranks of this worker; None when it is this one alone.
    """
    of_workers = gather_objects(mine, across)
    if inside is None:
        return [[theirs] for theirs in of_workers]
    of_shards = gather_objects(of_workers, inside)
    return [list(of_ranks) for of_ranks in zip(*of_shards, strict=False)]


def gather_at(place: str, mine: Any, across: Any, inside: Any) -> list[list[Any]]:
    """Return what `gather_all` does, at a place to which ranks may come by mistake while others are at another one.

    Args:
        place: what a rank calls there.
        mine: any object that can be pickled.
        across: process group of the ranks that hold the same values, one per worker, in worker order.
        inside: process group of all ranks of this worker; None when it is this one alone.

    Raises:
        UserError: other ranks have come to another place; on all ranks.
    """
    everyone = gather_all((place, mine), across, inside)
    places = [each[0] for of_worker in everyone for each in of_worker]
    if any(each != place for each in places):
        shards = len(everyone[0])
        said = held_by(places, lambda found: workers_in_words(found, shards))
        raise UserError(f"ranks have come to {said}; all ranks must make the same calls in the same order")
    return [[each[1] for each in of_worker] for of_worker in everyone]


def refuse_together(
    everyone: Sequence[Sequence[Sequence[str]]], own: Sequence[str], heading: str | None = None
) -> None:
    """Raise on all ranks if one of them has found something wrong.

    A rank says what it found itself; one that found nothing says what others did, and who.

    Args:
        everyone: what `gather_all` returned where every rank brought its problems, one sentence each.
        own: this rank's.
        heading: what was being checked; None where the sentences say it.

    Raises:
        UserError: there are problems.
    """
    shards = len(everyone[0])
    holders: dict[str, list[int]] = {}
    for index, problems in enumerate(problems for of_worker in everyone for problems in of_worker):
        for problem in problems:
            holders.setdefault(problem, []).append(index)
    said = list(own) or [f"{workers_in_words(indices, shards)}: {problem}" for problem, indices in holders.items()]
    if said:
        raise UserError("; ".join(said)) if heading is None else combine(said, heading)


def workers_in_words(indices: Sequence[int], shards: int = 1) -> str:
    """Return which workers these ranks are, or which ranks of them, given places among all ranks, worker by worker."""
    workers = sorted({index // shards for index in indices})
    if len(indices) == len(workers) * shards:
        return f"worker{'s' * (len(workers) > 1)} {numbers_in_words(workers)}"
    return ", ".join(f"rank {index % shards} of worker {index // shards}" for index in sorted(indices))


def numbers_in_words(values: Sequence[int]) -> str:
    """Return numbers in ascending order, with three or more in a row as a range: '0-3, 5'."""
    rows: list[list[int]] = []
    for value in sorted(values):
        if rows and value == rows[-1][-1] + 1:
            rows[-1].append(value)
        else:
            rows.append([value])
    parts = [f"{row[0]}-{row[-1]}" if len(row) > 2 else ", ".join(map(str, row)) for row in rows]
    return ", ".join(parts)
