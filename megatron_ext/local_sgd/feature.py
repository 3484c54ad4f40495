# SPDX-License-Identifier: Apache-2.0
"""Local SGD as a feature of a Megatron run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.hooks import (
    CutsWorkers,
    EvaluationEnd,
    EvaluationStart,
    Feature,
    GroupsBuilt,
    KeepsWeights,
    LoadContext,
    RepeatsSteps,
    SaveContext,
    SaveEnd,
    SavesState,
    SaveStart,
    StepEnd,
    StepStart,
    TrainEnd,
    TrainingLog,
    TrainStart,
    WorldReady,
    on,
)
from megatron_ext.local_sgd.arguments import argument_problems, complete_arguments, ending_notice, notices
from megatron_ext.local_sgd.checkpoints import sharded_format
from megatron_ext.local_sgd.checkpoints.legacy_files import assemble_files, request_files
from megatron_ext.local_sgd.checkpoints.load_plan import LoadPlan, plan_load, refuse_without_workers
from megatron_ext.local_sgd.checkpoints.weights_alone import keep_weights_alone
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.engine import LocalSGD
from megatron_ext.local_sgd.job.job_rounds import ROUND_TIMER, JobRounds, meet_early
from megatron_ext.local_sgd.job.synced_weights import SyncedWeights
from megatron_ext.local_sgd.job.worker import Worker
from megatron_ext.local_sgd.meetings.config import MeetingsConfig
from megatron_ext.local_sgd.meetings.counts import data_places
from megatron_ext.local_sgd.one_worker import makes_rounds
from megatron_ext.local_sgd.reporting import log_line
from megatron_ext.local_sgd.reporting.account import RoundAccount
from megatron_ext.local_sgd.same_options import require_same_options
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.reducer_config import GTAConfig
from megatron_ext.patching import Patch
from megatron_ext.phrases import plural
from megatron_ext.run_options import run_options
from megatron_ext.seams import checkpoint as checkpoint_seam
from megatron_ext.seams import gradients, logging, packed_lengths, process_groups, samples, training
from megatron_ext.seams.arguments import add_config_group, say
from megatron_ext.worker_groups import WorkerGroups

__all__ = ["LocalSGDFeature"]


class LocalSGDFeature(Feature, CutsWorkers, KeepsWeights, RepeatsSteps, SavesState):
    """Wires the engine to Megatron's groups, optimizer, loop, log and checkpoints."""

    name = "local-sgd"

    def __init__(self) -> None:
        self._measures = False
        self._reset()

    def _reset(self) -> None:
        gradients.forget_synchronous_warmup()
        self._groups: WorkerGroups | None = None
        self._worker: Worker | None = None
        self._account = RoundAccount()
        self._rounds: JobRounds | None = None
        """From the start of training on."""
        self._synced: SyncedWeights | None = None
        """Beside `_worker`, which a run that does not train has too if it loads an optimizer."""
        self._plan: LoadPlan | None = None
        self._restored = False
        self._samples = 0
        """Of the data, after which a worker's walk begins again; 0 where this rank reads none."""

    # Arguments.

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the groups of local SGD, of its fragments and of its outer optimizer."""
        add_config_group(parser, LocalSGDConfig, "local SGD")
        add_config_group(parser, MeetingsConfig, "local SGD with rounds by time (A-EDiT)")
        add_config_group(parser, StreamingConfig, "local SGD in fragments (Streaming DiLoCo)")
        add_config_group(parser, OuterOptimizerConfig, "outer optimizer")
        add_config_group(parser, GTAConfig, "pseudo-gradient reduction")

    def enabled(self, args: Any) -> bool:
        """Return whether there are outer rounds; one worker without an outer optimizer is an ordinary Megatron run."""
        return makes_rounds(args)

    def complete_arguments(self, args: Any) -> None:
        """Make every data-parallel rank a worker where their number is not given."""
        complete_arguments(args)

    def validate(self, args: Any) -> list[str]:
        """Check the options by themselves, against the run's shape, and against the table of options."""
        return argument_problems(args, self.name)

    def adjust_arguments(self, args: Any) -> list[str]:
        """Switch off what workers that train apart have no use for, and say what was chosen."""
        lines = notices(args)
        if args.rerun_mode != "disabled":
            lines.append(
                f"local SGD: --rerun-mode {args.rerun_mode} becomes 'disabled': workers do not repeat steps together"
            )
            args.rerun_mode = "disabled"
        if args.ckpt_assume_constant_structure:
            lines.append(
                "local SGD: --ckpt-assume-constant-structure has no effect: what a checkpoint holds changes from "
                "warm-up to rounds and within an interval, so that every save is planned from scratch"
            )
            args.ckpt_assume_constant_structure = False
        return lines

    def required_patches(self) -> Sequence[Patch]:
        """Return the seams that local SGD uses."""
        return [
            *process_groups.patches(),
            *training.patches(),
            *gradients.patches(),
            *logging.patches(),
            *packed_lengths.patches(),
            *samples.patches(),
            *checkpoint_seam.patches(),
        ]

    def worker_count(self, args: Any) -> int:
        """Return W."""
        return int(args.local_sgd_workers)

    # The run.

    @on(WorldReady)
    def on_world_ready(self, event: WorldReady) -> None:
        """Refuse ranks with other options than the others', which would cut other groups or wait forever."""
        self._measures = require_same_options(event.args)
        config = LocalSGDConfig.from_args(event.args)
        if config.use_async:
            # Who has made its share of a run's steps waits for those whose interval lasts.
            event.waits.append(config.local_sgd_sync_time)

    @on(GroupsBuilt)
    def on_groups_built(self, event: GroupsBuilt) -> None:
        """Start a run from nothing."""
        self._reset()
        self._groups = event.groups

    @on(TrainStart)
    def on_train_start(self, context: TrainStart) -> None:
        """Make the workers equal unless they were restored apart, and prepare warm-up."""
        config = LocalSGDConfig.from_args(context.args)
        worker = self._worker_of(context.args, context.model, context.optimizer)
        engine = worker.engine
        if not self._restored:
            worker.make_equal()
        else:
            # NCCL wants the first operation of a group to have all ranks, which pairs of workers are not.
            dist.all_reduce(torch.zeros((), device=engine.device), group=worker.groups.across)
        rounds = JobRounds(context, worker, self._account, saved=self._saved_meetings(), samples=self._samples)
        self._rounds = rounds
        if config.sync_in_forward or engine.streaming.in_background or engine.streaming.eager:
            # Megatron waits for all of the device after every exchange of pipeline stages, and so for a round's
            # messages, because of an error in a torch that is older than any that Megatron 0.19 runs with.
            context.config.batch_p2p_sync = False
        if engine.in_warmup and context.args.iteration < config.local_sgd_warmup_steps:
            gradients.install_synchronous_warmup(context.config, worker.groups, lambda: rounds.in_warmup)
        self._say_where(context.args, config, rounds)

    def _say_where(self, args: Any, config: LocalSGDConfig, rounds: JobRounds) -> None:
        """Log where training resumes, and whether it will end between two rounds."""
        engine = self._require_worker().engine
        if args.load and self._plan is None and not args.iteration:
            say(f"local SGD: no checkpoint was found in --load {args.load}; training starts from the beginning")
        if self._restored:
            steps = engine.steps_since_sync if rounds.meetings is None else rounds.meetings.steps_since_round
            into = plural(steps, "step")
            say(
                f"local SGD: resumed after round {engine.rounds}, {into} into the interval"
                if not engine.in_warmup
                else "local SGD: resumed during warm-up"
            )
        if not engine.drifts:
            done = max(args.iteration, config.local_sgd_warmup_steps) if engine.in_warmup else args.iteration
            since, interval = engine.steps_since_sync, config.local_sgd_sync_interval
            line = ending_notice(
                args.train_iters,
                done,
                since,
                interval,
                skipped=args.iterations_to_skip,
                weights_alone=args.no_save_optim,
            )
            if line is not None:
                say(line)

    @on(StepStart)
    def on_step_start(self, step: StepStart) -> None:
        """Decide whether this step is synchronous."""
        self._require_rounds().begin_step(step)

    @on(StepEnd)
    def on_step_end(self, step: StepEnd) -> None:
        """Run what is due of rounds."""
        self._require_rounds().end_step(step)

    # Inner steps of workers at their own pace.

    def another_step(self, made: int) -> bool:
        """Let this worker make steps until its interval is over."""
        return self._require_rounds().another_step(made)

    def batches_of_iteration(self) -> float:
        """Return how many global batches the last interval was."""
        meetings = None if self._rounds is None else self._rounds.meetings
        return 1.0 if meetings is None else meetings.batches

    def data_place(self, args: Any, samples: int) -> int:
        """Return where this worker's walk continues: where it was when a checkpoint was saved, if one was loaded."""
        self._samples = samples
        groups = self._require_groups()
        saved, consumed = self._saved_meetings(), args.consumed_train_samples
        return data_places(saved, groups.num_workers, args.global_batch_size, consumed)[groups.worker]

    def _saved_meetings(self) -> dict[str, Any] | None:
        """Return where workers that meet by time were when a checkpoint was saved, if one was loaded."""
        summary = self._plan.summary if self._plan is not None and self._restored else None
        return None if summary is None else summary["by_time"]

    def data_slack(self, args: Any) -> float | None:
        """Let workers that meet by time walk apart."""
        return MeetingsConfig.from_args(args).local_sgd_data_slack if args.local_sgd_use_async else None

    # Beside a sync service.

    def meet_before_sharing(self, iteration: int) -> None:
        """Let workers that differ meet early: after a resume their rounds may have moved."""
        worker = self._worker
        if worker is not None and not worker.engine.synced:  # without an engine nothing was restored that could differ
            meet_early(worker, self._account, iteration, None if self._rounds is None else self._rounds.scheduler)

    def follow_weights(self) -> None:
        """Let rounds start from the new weights."""
        if self._worker is not None and not self._worker.engine.in_warmup:
            self._worker.engine.move_anchor()

    def may_exit(self, iteration: int) -> bool:
        """Let the run end where the workers meet anyway."""
        engine = self._require_worker().engine
        return engine.synced or engine.met

    @on(TrainEnd)
    def on_train_end(self, event: TrainEnd) -> None:
        """Log when the weights that training continues with are not the synced ones."""
        engine, rounds = self._require_worker().engine, self._require_rounds()
        rounds.conclude()
        rounds.collect()
        if not engine.synced:
            say(
                f"local SGD: training ends {plural(engine.steps_since_sync, 'step')} after round {engine.rounds}; "
                "each worker holds its own weights"
            )

    # Evaluation.

    @on(EvaluationStart)
    def on_evaluation_start(self, event: EvaluationStart) -> None:
        """Put the anchor in place of the current weights when that is what evaluation runs on."""
        if self._worker is None or self._synced is None:  # --skip-train
            say("local SGD: evaluating the weights that were loaded")
            return
        engine = self._worker.engine
        if self._rounds is not None:
            self._rounds.conclude()
        if engine.synced:
            say("local SGD: evaluating the synced weights")
        elif engine.config.local_sgd_evaluation == "workers":
            say("local SGD: evaluating each worker's own weights")
        else:
            say(f"local SGD: evaluating the synced weights of round {engine.rounds}")
            self._synced.put()

    @on(EvaluationEnd)
    def on_evaluation_end(self, event: EvaluationEnd) -> None:
        """Put the worker's own weights back."""
        if self._synced is not None:
            self._synced.take_back()

    # The log.

    @on(TrainingLog)
    def on_training_log(self, log: TrainingLog) -> None:
        """Average the printed losses over the workers, and report the last round."""
        worker, rounds = self._require_worker(), self._require_rounds()
        log.timers.append(ROUND_TIMER)
        if rounds.meetings is not None:
            rounds.meetings.complete_log(log)
        if log.printing:
            log_line.average_losses(log, worker.groups.across)
            log.fields.extend(self._account.fields(worker.engine.rounds, worker.groups.num_workers))
        if log.writing:
            log.scalars.update(self._account.scalars())

    # Checkpoints.

    @on(SaveStart)
    def on_save_start(self, event: SaveStart) -> None:
        """End a round that was to end in the forward pass: what is saved are its results.

        Of weights without the optimizers' states those are saved that all workers have had last.
        """
        if self._rounds is not None:
            self._rounds.conclude()
        if self._synced is not None and run_options().no_save_optim and not self._require_worker().engine.synced:
            self._synced.put(biases=True)

    @on(SaveEnd)
    def on_save_end(self, event: SaveEnd) -> None:
        """Put the worker's own weights back."""
        if self._synced is not None and self._synced.is_put:
            self._synced.take_back()
            self._report_rounds()

    def save_state(self, context: SaveContext) -> None:
        """Give every worker its own place in the checkpoint, and add the outer state."""
        if not context.loading and context.args.no_save_optim:
            keep_weights_alone(context, self._require_groups().worker)
        elif not context.loading:
            worker, rounds = self._require_worker(), self._rounds
            by_time = None if rounds is None or rounds.meetings is None else rounds.meetings.state()
            if context.files is None:
                sharded_format.assemble(context, worker, by_time)
            else:
                assemble_files(context, context.files, worker, by_time)
            self._report_rounds()
        elif self._plan is not None:
            if context.optimizer is not None:
                self._worker_of(context.args, context.model, context.optimizer)
            if context.files is None:
                sharded_format.request(context, self._plan, self._require_groups(), self._worker)
            else:
                request_files(context, context.files, self._plan, self._worker)

    def _report_rounds(self) -> None:
        """Report rounds in flight, which saves give their outer steps; if the run ends here, nothing else logs them."""
        if self._rounds is not None:
            self._rounds.collect()

    def check_load(self, context: LoadContext) -> None:
        """Refuse a checkpoint whose workers differ when this run has no workers."""
        refuse_without_workers(context)

    def load_state(self, context: LoadContext) -> None:
        """Find out what the checkpoint holds, then take the outer state out of what was read."""
        groups = self._require_groups()
        if context.common_only:
            self._plan = plan_load(context, groups.num_workers, groups.worker)
            say(self._plan.describe())
        elif self._plan is not None:
            self._restored = sharded_format.restore(context, self._plan, self._worker)

    # Parts.

    def build_engine(self, args: Any, model: Sequence[Any], optimizer: Any) -> LocalSGD:
        """Return the engine, which is built at the first call.

        Args:
            args: Megatron's argument namespace.
            model: the model chunks.
            optimizer: the `MegatronOptimizer`.
        """
        return self._worker_of(args, model, optimizer).engine

    def _worker_of(self, args: Any, model: Sequence[Any], optimizer: Any) -> Worker:
        if self._worker is None:
            self._worker = Worker(args, model, optimizer, self._require_groups(), observe=self._measures)
            self._synced = SyncedWeights(self._worker, model)
        return self._worker

    def _require_groups(self) -> WorkerGroups:
        assert self._groups is not None, "local SGD: groups are not built yet"
        return self._groups

    def _require_worker(self) -> Worker:
        assert self._worker is not None, "local SGD: training has not started"
        return self._worker

    def _require_rounds(self) -> JobRounds:
        assert self._rounds is not None, "local SGD: training has not started"
        return self._rounds
