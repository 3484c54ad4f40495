# SPDX-License-Identifier: Apache-2.0
"""What runs the rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.engine import LocalSGD
from megatron_ext.local_sgd.plain_torch.agreed import Settings
from megatron_ext.local_sgd.plain_torch.attached import attach_to
from megatron_ext.local_sgd.plain_torch.buffers import SharedBuffers
from megatron_ext.local_sgd.plain_torch.forward_hooks import ForwardHooks
from megatron_ext.local_sgd.plain_torch.parameters import (
    averages_gradients,
    in_model_order,
    require_same_memory,
)
from megatron_ext.local_sgd.plain_torch.replaced_weights import ReplacedWeights
from megatron_ext.local_sgd.plain_torch.saved_state import StateGuard
from megatron_ext.local_sgd.plain_torch.wording import as_fields, speaks_of_fields
from megatron_ext.local_sgd.reporting.round_report import RoundReport, WorkerProgress
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.local_sgd.time_based import AsyncSchedule
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.reducer_config import GTAConfig
from megatron_ext.seams.arguments import say
from megatron_ext.transport.collectives import collective_device

__all__ = ["OuterOptimPeriodicModelAverager"]


class OuterOptimPeriodicModelAverager:
    """Runs outer rounds over the workers' parameters, once per interval."""

    @speaks_of_fields()
    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        local_sgd_config: LocalSGDConfig,
        outer_optim_config: OuterOptimizerConfig | None = None,
        gta_config: GTAConfig | None = None,
        streaming_config: StreamingConfig | None = None,
        shard_group: dist.ProcessGroup | None = None,
        total_global_steps: int | None = None,
        buffers: Literal["average", "own"] = "average",
        inner_optimizers: Literal["same", "own"] = "same",
    ) -> None:
        """Check the configuration, and that all workers have the same; all ranks must call it.

        Args:
            process_group: one rank per worker, in worker order: those that hold the same parameters, or the same
                shard of them. All ranks when None.
            local_sgd_config: schedule and penalty. `use_local_sgd` and `local_sgd_workers` are set from the group;
                what is evaluated is the caller's choice, so `local_sgd_evaluation` counts as 'workers'. Rounds are
                written to `local_sgd_round_log` only where that is given; the first rank writes them. One worker makes
                no rounds, unless `local_sgd_workers` is given as 1 and `outer_optim_config` is given.
            outer_optim_config: the outer optimizer; DiLoCo's when None.
            gta_config: how pseudo-gradients become one; their mean when None.
            streaming_config: fragments, and how rounds overlap with training; the whole model at once when None.
            shard_group: all ranks of this worker, when its parameters are sharded over several.
            total_global_steps: with `use_async`, steps of all workers together after which `finished` is true.
            buffers: 'average' = the module's persistent buffers (such as BatchNorm's running statistics) must be equal
                when the optimizer is wrapped, and are made so wherever workers meet: by their mean where they are
                floating-point numbers, else by the first worker's. 'own' = every worker keeps its own, unchecked.
            inner_optimizers: 'same' = their class and all settings but learning rates must be equal on all workers when
                they are wrapped. 'own' = they may differ, unchecked, as where workers try out settings.

        Raises:
            UserError: a value is bad, rounds cannot be written to the file, or another rank has other values or a bad
                one; on all ranks.
        """
        self._across: dist.ProcessGroup = process_group or dist.distributed_c10d._get_default_group()
        self._inside = shard_group
        workers = dist.get_world_size(self._across)
        self.config = dataclasses.replace(
            local_sgd_config, use_local_sgd=True, local_sgd_workers=workers, local_sgd_evaluation="workers"
        )
        self.outer = outer_optim_config or OuterOptimizerConfig()
        self.gta = gta_config or GTAConfig()
        self.streaming = streaming_config or StreamingConfig()
        self._settings = Settings(
            config=self.config,
            outer=self.outer,
            gta=self.gta,
            streaming=self.streaming,
            given=local_sgd_config,
            total_global_steps=total_global_steps,
            buffers=buffers,
            inner_optimizers=inner_optimizers,
            has_outer=outer_optim_config is not None,
        )
        self._round_log, self._logged = self._settings.agree(self._across, self._inside)
        self._alone = self._settings.trains_alone
        if self._alone:
            _say("one worker trains alone, without outer rounds and their optimizer")
        self._engine: LocalSGD | None = None
        self._parameters: dict[str, torch.Tensor] = {}
        self._hooks: ForwardHooks | None = None
        self._unchecked: torch.nn.Module | None = None
        self._guard: StateGuard | None = None
        self._replaced: ReplacedWeights | None = None
        self._buffers: SharedBuffers | None = None
        self._launched_at = 0
        self._schedule = AsyncSchedule(
            self.config,
            total_steps=total_global_steps,
            across=self._across,
            inside=self._inside,
            device=collective_device(self._across),
        )
        self.step = 0
        self.when_healed: Callable[[], None] | None = None
        """Called when rounds have left out this worker, whose values were non-finite: it continues from the synced
        weights, which the inner optimizer's moments would spoil."""
        self.when_met: Callable[[], None] | None = None
        """Called on all ranks after workers have met, at the same place of each one's training."""

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group with one rank per worker."""
        return self._across

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The group of this worker's ranks, if there are several."""
        return self._inside

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """What is averaged, by name, in the order in which states have it; empty before `attach`."""
        return self._parameters

    def say(self, message: str) -> None:
        """Print a line on the first rank."""
        _say(message)

    @property
    def keeps_in_step(self) -> bool:
        """Whether all workers make the same steps between rounds, and all of them meet in each."""
        return not (self._alone or self.config.use_async or self._settings.apart)

    @property
    def engine(self) -> LocalSGD:
        """The engine.

        Raises:
            UserError: `attach` was not called.
        """
        if self._engine is None:
            raise UserError(
                "the averager knows no parameters; wrap the optimizer in StatefulPostLocalSGDOptimizer, or call "
                "attach(), before the first step"
            )
        return self._engine

    def _require_guard(self) -> StateGuard:
        """Return what looks at states; after `engine`, which refuses where `attach` was not called."""
        assert self._guard is not None
        return self._guard

    @torch.no_grad()
    @speaks_of_fields()
    def attach(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        model: torch.nn.Module | None = None,
        inner: torch.optim.Optimizer | None = None,
    ) -> None:
        """Take the parameters to average; without warm-up their present values are the anchor.

        Args:
            named_parameters: fp32, of the same names and shapes on all workers, and equal there. DTensors stand for
                their local shards. What several ranks of `shard_group` hold alike counts once in norms: plain
                tensors, and DTensors along the dimensions in which they are replicated.
            model: the module that has them, by these names; needed with `sync_in_forward`.
            inner: the optimizer that trains them.

        Raises:
            UserError: it was called before, one is not fp32, there are more fragments than layers, the module is
                missing or lacks a parameter, or the workers' models differ: their parameters, inner optimizers (see
                `inner_optimizers`), buffers (see `buffers`) or frozen values; on all ranks.
            RuntimeError: the workers' values differ.
        """
        if self._engine is not None:
            raise UserError("the averager has its parameters already; make another one for another optimizer")
        attached = attach_to(
            in_model_order(dict(named_parameters), model),
            model,
            inner,
            settings=self._settings,
            across=self._across,
            inside=self._inside,
            observe=self._logged,
            land=self._land,
            say=_say,
        )
        self._engine, self._parameters, self._guard = attached.engine, attached.parameters, attached.guard
        self._hooks, self._buffers = attached.hooks, attached.buffers
        self._unchecked = model
        if self.config.local_sgd_warmup_steps == 0:
            self._begin()
        self._replaced = attached.replaced
        if self._replaced is not None:
            self._replaced.expect("wrapped")

    @torch.no_grad()
    @speaks_of_fields()
    def before_step(self) -> None:
        """Make ready for an inner step; all ranks call it before each, and `average_parameters` after it.

        Raises:
            UserError: the weights are not those that local SGD's anchor belongs to, because others were loaded. Before
                the first step after the optimizer was wrapped others that are the same on all workers become the
                anchor, and a line says so.
        """
        self._check_weights()
        self.land()

    def _check_weights(self) -> None:
        """Check that weights are those that the anchor belongs to."""
        if self._replaced is not None:
            self._replaced.check(self.engine.take_anchor)

    @torch.no_grad()
    @speaks_of_fields()
    def average_parameters(self, params: object = None) -> RoundReport | None:
        """Count one inner step, and do what is due of rounds; all ranks call it after each of their steps.

        Args:
            params: ignored; torch's averagers take it.

        Returns:
            The report of the last round whose outer step was made, if there was one.

        Raises:
            UserError: the parameters were changed before the last round had brought all of them.
            RuntimeError: a worker brought non-finite weights, and nothing was asked for that could leave it
                out.
        """
        engine = self.engine
        if self._hooks is not None and self._hooks.open and not self._hooks.complete:
            raise UserError(
                "parameters were changed while a round was in flight; call averager.land() before the inner "
                "optimizer's step, as StatefulPostLocalSGDOptimizer does"
            )
        if self._replaced is not None:
            self._replaced.forget()
        ended = self.end_round()
        self.step += 1
        if self.step == self.config.local_sgd_warmup_steps:
            self._begin()
        elif self.step < self.config.local_sgd_warmup_steps:
            pass
        elif self.config.use_async:
            engine.count_step()
            if self._schedule.is_over(self.step):
                return self._meet()
        elif engine.count_step() and not self._alone:
            self._check_gradients()
            require_same_memory(list(self._parameters.values()), engine.synced_tensors)
            progress = engine.advance()
            if self._hooks is not None:
                self._hooks.expect()
                self._launched_at = self.step
            report = self._take(progress)
            if engine.met:
                self._settle()
            return report or ended
        return ended

    def _settle(self) -> None:
        """Make equal what rounds do not move, wherever workers have met."""
        if self._buffers is not None:
            for line in self._buffers.meet():
                _say(line)
        if self.when_met is not None:
            self.when_met()

    def _check_gradients(self) -> None:
        """Say once that rounds save nothing, if so: a module's hook may be registered after it was attached."""
        if self._unchecked is not None and averages_gradients(self._unchecked, self._across):
            _say(
                "DDP averages the gradients of all workers in every step, so rounds save nothing; register "
                "post_localSGD_hook (docs/local-sgd.md, 'Without Megatron'), or give DDP the worker's own process_group"
            )
        self._unchecked = None

    @torch.no_grad()
    def land(self) -> None:
        """Wait for what a round with `sync_in_forward` has still to bring, before parameters are changed."""
        if self._hooks is not None:
            self._hooks.land_all()

    @torch.no_grad()
    @speaks_of_fields()
    def end_round(self) -> RoundReport | None:
        """End a round that was to end in the next forward pass; all ranks must call it at the same place.

        With `sync_in_forward` that is needed before anything but training's forward pass reads the parameters: before
        the module's `state_dict()`, and before evaluation. At other times it does nothing.

        Returns:
            The report of the round, unless it was returned before.

        Raises:
            RuntimeError: see `average_parameters`.
        """
        if self._hooks is None or not self._hooks.open:
            return None
        self._hooks.land_all()
        self._hooks.close()
        return self._take(self.engine.conclude(), self._launched_at)

    @property
    def finished(self) -> bool:
        """Whether the workers of an asynchronous run have made `total_global_steps` together; the same on all."""
        return self._schedule.finished

    @torch.no_grad()
    @speaks_of_fields()
    def wait(self) -> None:
        """Still join rounds without a weight until the run is finished: for a worker that has no more data.

        Raises:
            UserError: the run is not asynchronous, or has no `total_global_steps`.
        """
        if not self.config.use_async or self._schedule.total_steps is None:
            raise UserError("wait() is for workers of an asynchronous run: use_async=True, total_global_steps=N")
        self._check_weights()
        while not self.finished:
            self._meet()

    def replay(self, meetings: Sequence[int]) -> None:
        """Meet the other workers after the steps that another run has recorded, which repeats that run exactly.

        Args:
            meetings: what `meetings` of this worker's averager was there.
        """
        self._schedule.replay(meetings)

    @property
    def meetings(self) -> list[int]:
        """After which of its steps this worker of an asynchronous run met the others."""
        return self._schedule.meetings

    def _begin(self) -> None:
        """Take the anchor; the first interval begins."""
        if not self._alone:
            try:
                self.engine.take_anchor()
            except RuntimeError as error:
                raise RuntimeError(
                    f"{error}; weights that were saved in the middle of an interval are loaded after the optimizer was "
                    "wrapped, and then its state"
                ) from error
        if self.step and not self._alone:  # at the start they were seen to be equal
            self._settle()
        self._schedule.start(self.step)

    def _meet(self) -> RoundReport | None:
        """Wait for the others, and make a round if all together have made enough steps."""
        steps = self._schedule.meet(self.step)
        if steps is None or self._alone:
            return None
        report = self._take(self.engine.sync(steps))
        self._settle()
        return report

    def _land(self, units: Sequence[str]) -> None:
        """Wait until the results of units are among the parameters."""
        self.engine.land(units)
        if self._inside is not None and self.engine.values and self.engine.values[0].is_cuda:
            # FSDP gathers in a stream of its own, which does not wait for this one.
            torch.cuda.current_stream().synchronize()

    def _take(self, progress: WorkerProgress, step: int | None = None) -> RoundReport | None:
        """Take note of what rounds after a step did, the present one unless given; return the last one's report."""
        if progress.healed and self.when_healed is not None:
            self.when_healed()
        for report in progress.reports:
            for remark in report.remarks(self.config.is_debug):
                _say(remark)
            if self._round_log is not None:
                self._round_log.write(report, (step or self.step) - 1)
        return progress.reports[-1] if progress.reports else None

    @torch.no_grad()
    @speaks_of_fields()
    def synchronize(self) -> None:
        """Make all workers equal by a round of the whole model now, as at the end of training; all ranks call it."""
        self._check_weights()
        self.end_round()
        if not self.engine.synced:
            self._take(self.engine.finish())
            self._settle()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state; all ranks must call it, because anchor and outer state are sharded over workers.

        Raises:
            UserError: weights were replaced since the optimizer was wrapped, and differ between the workers.
        """
        if self._replaced is not None:
            self._replaced.settle(self.engine.take_anchor)
        self.end_round()
        engine = self.engine
        return {
            "step": self.step,
            "common": engine.tensor_state(),
            "own": engine.worker_state(),
            "scalars": engine.scalar_state(),
            "schedule": self._schedule.state(),
            **self._require_guard().description({} if self._replaced is None else self._replaced.known()),
        }

    @torch.no_grad()
    @speaks_of_fields()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank; all ranks must call it.

        The parameters must have the values of that time, which digests in the state tell.

        Raises:
            UserError: it was saved with another outer optimizer, reducer, codec or fragments, for other parameters,
                for other values of theirs, or by another number of workers where each has something of its own; on
                all ranks.
        """
        self.end_round()
        engine, guard = self.engine, self._require_guard()
        guard.refuse_unfit(state)
        engine.load(state["common"], state["scalars"], state["own"])
        if guard.is_of_as_many(state):
            self._schedule.load(state["schedule"])
        self.step = int(state["step"])
        if self._replaced is not None:
            # Before anything was trained the state says no more than a new optimizer does.
            self._replaced.expect("loaded" if self.step or engine.rounds else "wrapped")
        if not guard.knows_its_weights(state):
            _say(
                "the saved state is of an earlier release and does not say to which weights it belongs; they are not "
                "checked"
            )
        for flag, (before, now) in guard.changed(state).items():
            _say(f"{flag} was {before} in the run that saved, and is {now} from here on")


def _say(message: str) -> None:
    if dist.get_rank() == 0:
        say(f"local SGD: {as_fields(message)}")
