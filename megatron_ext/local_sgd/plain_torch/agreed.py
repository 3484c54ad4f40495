# SPDX-License-Identifier: Apache-2.0
"""The settings of an averager: their problems, and whether all ranks have the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_ext.errors import UserError, combine
from megatron_ext.local_sgd.agreement import (
    canonical,
    differences,
    gather_all,
    refuse_together,
    settings_of,
    workers_in_words,
)
from megatron_ext.local_sgd.combinations import method_problems
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.one_worker import one_worker_problems
from megatron_ext.local_sgd.reporting.round_writer import RoundWriter
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.places import Where
from megatron_ext.outer.reducer_config import GTAConfig

__all__ = ["Settings"]

_HEADING = "local SGD"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an averager was given, with `use_local_sgd` and the number of workers filled in."""

    config: LocalSGDConfig
    """Schedule, penalty and codec."""

    outer: OuterOptimizerConfig
    """The outer optimizer."""

    gta: GTAConfig
    """How pseudo-gradients become one."""

    streaming: StreamingConfig
    """Fragments."""

    given: LocalSGDConfig
    """`config` as it was given."""

    total_global_steps: int | None
    """Steps after which an asynchronous run is over."""

    buffers: str
    """What becomes of the module's buffers."""

    inner_optimizers: str
    """Whether inner optimizers must be the same."""

    has_outer: bool = False
    """Whether the outer optimizer was given."""

    @property
    def trains_alone(self) -> bool:
        """Whether there are no outer rounds: one worker has them if it is asked for, with an outer optimizer."""
        return self.config.local_sgd_workers == 1 and not self._steps_by_itself

    @property
    def _steps_by_itself(self) -> bool:
        return self.given.local_sgd_workers == 1 and self.has_outer

    @property
    def apart(self) -> bool:
        """Whether workers have anchors of their own, so that no round brings all of them together."""
        return self.gta.in_pairs or self.streaming.eager

    def agree(self, across: Any, inside: Any) -> tuple[RoundWriter | None, bool]:
        """Check the values, and that all ranks have the same; all ranks must call it.

        Args:
            across: process group of the ranks that hold the same values, one per worker, in worker order.
            inside: process group of all ranks of this worker; None when it is this one alone.

        Returns:
            What writes rounds, on the rank that does, and whether any rank has it: all of them measure for it.

        Raises:
            UserError: a value is bad, or differs; on all ranks.
        """
        problems, writer = self._problems(), None
        path = self.config.local_sgd_round_log
        if not problems and path not in (None, "none") and dist.get_rank() == 0:
            try:
                writer = RoundWriter(Path(path))
            except UserError as error:
                problems = [str(error)]
        settings = {
            **settings_of(self.config, self.outer, self.gta, self.streaming),
            "total_global_steps": canonical(self.total_global_steps),
            "buffers": canonical(self.buffers),
            "inner_optimizers": canonical(self.inner_optimizers),
            "the number of ranks in shard_group": canonical(inside and dist.get_world_size(inside)),
        }
        everyone = gather_all((problems, settings, writer is not None, dist.get_rank()), across, inside)
        mine = [each[3] for each in everyone[dist.get_rank(across)]]
        if inside is not None and mine != dist.get_process_group_ranks(inside):
            raise UserError(
                f"shard_group has the ranks {dist.get_process_group_ranks(inside)} of this worker, and by their "
                f"process_group they would be {mine}; give both groups in one order of workers"
            )
        refuse_together([[each[0] for each in of_worker] for of_worker in everyone], problems, _HEADING)
        ranks = [each for of_worker in everyone for each in of_worker]
        shards = len(everyone[0])
        different = differences([each[1] for each in ranks], lambda found: workers_in_words(found, shards))
        if different:
            raise combine(different, _HEADING)
        return writer, any(each[2] for each in ranks)

    def _problems(self) -> list[str]:
        """Return the problems of the values by themselves, one sentence each."""
        configs = (self.given, self.outer, self.gta, self.streaming)
        wrong = [problem for each in configs for problem in each.type_problems()]
        if wrong:
            return wrong
        problems = self.config.problems()
        problems += method_problems(self.config, self.outer, self.gta, self.streaming, Where.PLAIN)
        count, given = self.config.local_sgd_workers, self.given.local_sgd_workers
        if given not in (None, count):
            problems.append(
                f"local_sgd_workers is {given}, and process_group has {count} ranks, one per worker; drop it"
            )
        if count == 1 and self._steps_by_itself:
            # What is evaluated is the caller's choice.
            config = replace(self.config, local_sgd_evaluation="synced")
            problems += one_worker_problems(self.outer, self.streaming, self.gta, config, steps=True)
        if self.total_global_steps is not None and not self.config.use_async:
            problems.append("total_global_steps has no effect without use_async; drop it")
        if self.buffers not in ("average", "own"):
            problems.append(f"buffers is {self.buffers!r}; it must be 'average' or 'own'")
        if self.inner_optimizers not in ("same", "own"):
            problems.append(f"inner_optimizers is {self.inner_optimizers!r}; it must be 'same' or 'own'")
        return problems
