# SPDX-License-Identifier: Apache-2.0
"""A simulated run with hot switching from its settings, and the single strategies to compare it with.

What a step trains, how it is split and packed, how long rows and switches take and whether all of it fits are decided
by the functions of a run and of `megatron-ext hot-switch suggest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import numpy.typing as npt

from megatron_ext.errors import UserError, combine
from megatron_ext.hot_switch.cost_model.recomputation import recompute_to_fit, static_with_recomputation
from megatron_ext.hot_switch.cost_model.step_time import ModelledTimes, Recompute, StepTimes
from megatron_ext.hot_switch.cost_model.suggest import Suggester
from megatron_ext.hot_switch.data.sequences import SequenceOrder
from megatron_ext.hot_switch.planning.plan import check_nodes
from megatron_ext.hot_switch.strategies.strategy import Strategy
from megatron_ext.hot_switch.strategies.strategy_list import StrategyList
from megatron_ext.params import GptShape
from megatron_ext.phrases import short_number
from megatron_ext.simulate.hot_switching.choices import Kernels, Recomputing
from megatron_ext.simulate.hot_switching.document_lengths import SimulatedDocuments, log_normal_lengths
from megatron_ext.simulate.hot_switching.gpu_cluster import GIB, SimulatedCluster
from megatron_ext.simulate.hot_switching.switching_run import SwitchingRun

__all__ = ["BEST", "BEST_RECOMPUTING", "HOME", "HOT", "DoesNotFit", "SwitchingSetup"]

HOT, HOME = "hot switching", "home"
BEST, BEST_RECOMPUTING = "best static", "best static, recomputing"
"""Names of the ways to train."""

_LONGEST = 100_000_000
"""Tokens of a sequence."""

_UNMODELLED = {
    "cp": 1,
    "ep": 1,
    "etp": None,
    "vpp": 1,
    "first_stage_layers": None,
    "last_stage_layers": None,
    "stage_layers": None,
    "micro_batch_group": None,
    "micro_batch_size": 1,
}
"""Fields of a strategy that the cost model has no times for unless they are these."""


class DoesNotFit(UserError):
    """A list needs more memory than there is."""


@dataclass(frozen=True, kw_only=True)
class SwitchingSetup:
    """Strategies, model, GPUs and data."""

    shape: GptShape
    """The model."""

    strategies: StrategyList
    """With buckets."""

    cluster: SimulatedCluster
    """The GPUs."""

    data: SimulatedDocuments
    """Batches."""

    documents: npt.NDArray[np.int64] | None = None
    """Tokens of each document; None for assumed lengths."""

    gpus_per_node: int = 8
    """As for a run."""

    kernels: Kernels = "documents"
    """Of attention."""

    recompute: Recomputing = "needed"
    """Of the list's strategies, and of its home alone."""

    active_experts: int = 1
    """Routed experts that a token meets in a layer."""

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: with all problems.
        """
        problems = self.cluster.problems() + self.data.problems(measured=self.documents is not None)
        if self.documents is not None and not (self.documents > 1).any():
            problems.append("--lengths has no document of two or more tokens, and nothing to predict; give others")
        if not self.strategies.buckets:
            problems.append(
                "--hot-switch-bucket-sizes is missing; give the bounds of lengths, one more than strategies"
            )
        elif self.strategies.buckets[0].up_to > _LONGEST:
            longest = short_number(self.strategies.buckets[0].up_to)
            problems.append(f"--hot-switch-bucket-sizes: the first is {longest}; give at most {_LONGEST}")
        problems += [
            f"strategy {strategy.label}: {name} has no time in the cost model; drop it"
            for strategy in self.strategies.strategies
            for name, without in _UNMODELLED.items()
            if getattr(strategy, name) != without
        ]
        if not problems and self.data.global_batch_size % self.strategies.home.dp:
            problems.append(
                f"--global-batch-size {self.data.global_batch_size} is not a multiple of home's dp, "
                f"{self.strategies.home.dp}"
            )
        if problems:
            raise combine(problems, "simulate")
        check_nodes(self.strategies.home.world_size, self.gpus_per_node, "--hot-switch-gpus-per-node")

    def runs(self) -> dict[str, SwitchingRun]:
        """Return what becomes of the list, of its home alone, and of the quickest single strategies.

        Single strategies that do not fit are left out.

        Raises:
            DoesNotFit: the list does not.
        """
        batches = self._batches()
        context = self.strategies.buckets[0].up_to
        suggester = Suggester(
            self.times(), gpus=self.strategies.home.world_size, lengths=batches[0], context=context
        )
        static, bounds = (context, 0), sorted({bucket.up_to for bucket in self.strategies.buckets} | {0}, reverse=True)
        listed = self._fitted(suggester, self.strategies.strategies, bounds)
        if listed is None:
            raise DoesNotFit(f"simulate: {self._need(suggester)}")
        found = {HOT: self._run(suggester, batches, listed, bounds)}
        alone = self._fitted(suggester, [self.strategies.home], static)
        if alone is not None:
            found[HOME] = self._run(suggester, batches, alone, static)
        recomputing = static_with_recomputation(suggester)
        plain = [strategy for strategy in recomputing if strategy.recompute == "none"]
        for name, candidates in ((BEST, plain), (BEST_RECOMPUTING, recomputing)):
            runs = [self._run(suggester, batches, [strategy], static) for strategy in candidates]
            if runs:
                found[name] = min(runs, key=lambda run: run.seconds)
        return found

    def times(self) -> StepTimes:
        """Return the cost model's times of the model on these GPUs."""
        times = ModelledTimes(
            shape=self.shape,
            machine=self.cluster.machine(self.gpus_per_node),
            unfused_attention=self.kernels == "rows",
            active_experts=self.active_experts,
        )
        return StepTimes(times=times, attention="documents" if self.kernels == "documents" else "rows")

    @property
    def beyond_context(self) -> float:
        """Part of the documents that are longer than the longest sequence, and become several."""
        return float((self._lengths - 1 > self.strategies.buckets[0].up_to).mean())

    @property
    def _lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of every document."""
        if self.documents is not None:
            return self.documents
        return log_normal_lengths(self.data.mean_length, self.data.length_spread)

    def _batches(self) -> list[list[int]]:
        """Return the positions of every sequence of every step, in the order in which a run reads them."""
        order = SequenceOrder(self._lengths, longest=self.strategies.buckets[0].up_to, seed=self.data.seed)
        size = self.data.global_batch_size
        return [order.positions(step * size, size).tolist() for step in range(self.data.steps)]

    def _fitted(
        self, suggester: Suggester, strategies: Sequence[Strategy], bounds: Sequence[int]
    ) -> list[Strategy] | None:
        """Return the strategies with what they compute again; None where they do not fit."""
        asked = [replace(strategy, sequence_parallel=strategy.tp > 1) for strategy in strategies]
        if self.recompute != "needed":
            asked = [replace(strategy, recompute=self.recompute) for strategy in asked]
        fitted = recompute_to_fit(suggester, asked, bounds)
        return fitted if self.recompute == "needed" or fitted == asked else None

    def _need(self, suggester: Suggester) -> str:
        """Return what the list needs in place of what there is."""
        least = self.recompute if self.recompute != "needed" else get_args(Recompute)[-1]
        listed = replace(
            self.strategies,
            strategies=tuple(
                replace(strategy, sequence_parallel=strategy.tp > 1, recompute=least)
                for strategy in self.strategies.strategies
            ),
        )
        held, label = max(
            zip(suggester.memory(listed), (one.label for one in listed.strategies), strict=True)
        )
        fix = "" if least == "full" else ", or --recompute needed"
        return (
            f"the strategies need {held / GIB:.1f} GiB (in the turn of {label}), and --memory-gib is "
            f"{self.cluster.memory_gib:g}; use more GPUs, a shorter context (the first of --hot-switch-bucket-sizes)"
            f"{fix}"
        )

    def _run(
        self,
        suggester: Suggester,
        batches: Sequence[Sequence[int]],
        strategies: Sequence[Strategy],
        bounds: Sequence[int],
    ) -> SwitchingRun:
        return SwitchingRun(
            steps=[suggester.on(lengths).estimate(strategies, bounds) for lengths in batches],
            tokens=sum(map(sum, batches)),
            gpus=suggester.gpus,
        )
