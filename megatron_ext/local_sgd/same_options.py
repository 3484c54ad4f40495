# SPDX-License-Identifier: Apache-2.0
"""Checks that all ranks of a Megatron job were started with the same options of local SGD, which Megatron does not.

They decide how process groups are cut, so this comes before there is any but the world, and nothing may be lost by a
rank that does not take part because it was started without `--use-local-sgd`: ranks leave their options in the store
through which they found each other, and the first one compares them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_ext.errors import combine
from megatron_ext.local_sgd.agreement import canonical, differences, numbers_in_words, settings_of
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.meetings.config import MeetingsConfig
from megatron_ext.local_sgd.reporting.round_writer import round_log_path
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.reducer_config import GTAConfig

__all__ = ["measures_for_report", "require_same_options"]

_PREFIX = "megatron_ext/local_sgd/options"
_HEADING = "arguments"
_calls = itertools.count()


def measures_for_report(args: Any) -> bool:
    """Return whether this rank has a path for the parts of a round's report that are not norms."""
    return bool(round_log_path(args) or args.tensorboard_dir or args.wandb_project)


def require_same_options(args: Any) -> bool:
    """Check that all ranks have the same options of local SGD; all ranks must call it.

    Args:
        args: Megatron's argument namespace.

    Returns:
        Whether any rank measures for the report, so that all have to.

    Raises:
        UserError: options differ, or a rank has not said its own; on all ranks that call it.
    """
    if dist.get_backend() == "fake":  # one rank of a job by itself, for `megatron_ext.explain`
        return measures_for_report(args)
    number = next(_calls)  # what earlier runs of these processes have left in the store is not an answer
    store = dist.distributed_c10d._get_default_store()
    world, rank = dist.get_world_size(), dist.get_rank()
    keys = [f"{_PREFIX}/{number}/{index}" for index in range(world)]
    verdict = f"{_PREFIX}/{number}/verdict"
    # A rank that does not take part is at its first collective operation by then, and gives up after all of the time.
    limit = timedelta(minutes=args.distributed_timeout_minutes / 2)
    store.set(keys[rank], json.dumps([_options(args), measures_for_report(args)]))
    if rank == 0:
        missing = _wait(store, keys, limit)
        said = [json.loads(store.get(key)) for key in keys] if not missing else []
        problems = [_silent(missing, limit)] if missing else _problems([options for options, _ in said])
        store.set(verdict, json.dumps([problems, any(measures for _, measures in said)]))
    elif _wait(store, [verdict], limit * 1.5):
        raise combine([_silent([0], limit)], _HEADING)
    problems, measures = json.loads(store.get(verdict))
    if problems:
        raise combine(problems, _HEADING)
    return bool(measures)


def _options(args: Any) -> dict[str, str]:
    found = settings_of(
        LocalSGDConfig.from_args(args),
        OuterOptimizerConfig.from_args(args),
        GTAConfig.from_args(args),
        StreamingConfig.from_args(args),
    )
    # Where meetings are recorded is the first rank's affair.
    own = ("--local-sgd-data-slack", "--local-sgd-replay-meetings")
    return {**found, **{flag: canonical(MeetingsConfig.from_args(args).by_flag()[flag]) for flag in own}}


def _problems(options: Sequence[Mapping[str, str]]) -> list[str]:
    return differences(options, _ranks, "start all ranks with the same command line")


def _wait(store: Any, keys: Sequence[str], limit: timedelta) -> list[int]:
    """Wait until there are keys; return the places of those that have not come in time."""
    try:
        store.wait(list(keys), limit)
    except dist.DistStoreError:
        return [place for place, key in enumerate(keys) if not store.check([key])]
    return []


def _silent(ranks: Sequence[int], limit: timedelta) -> str:
    return (
        f"{_ranks(ranks)} did not say within {limit} (half of --distributed-timeout-minutes) which options of local "
        "SGD it was given; start all ranks with the same command line, --use-local-sgd and --local-sgd-workers included"
    )


def _ranks(indices: Sequence[int]) -> str:
    return f"rank{'s' * (len(indices) > 1)} {numbers_in_words(indices)}"
