# SPDX-License-Identifier: Apache-2.0
"""The rounds of a job's workers around Megatron's steps: by steps or by time, at once or in the next forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.hooks import StepEnd, StepStart, TrainStart
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.job.arrivals import Arrivals
from megatron_ext.local_sgd.job.worker import Worker
from megatron_ext.local_sgd.learning_rate import may_skip_steps
from megatron_ext.local_sgd.meetings.loop import MeetingLoop
from megatron_ext.local_sgd.reporting.account import RoundAccount
from megatron_ext.local_sgd.reporting.round_report import WorkerProgress
from megatron_ext.local_sgd.schedule import last_step
from megatron_ext.phrases import plural
from megatron_ext.seams import forward
from megatron_ext.seams.arguments import say

__all__ = ["ROUND_TIMER", "JobRounds", "meet_early"]

ROUND_TIMER = "outer-sync"


class JobRounds:
    """Begins and ends a worker's rounds, from the first step of training to the last one.

    Attributes:
        in_warmup: whether the current step is synchronous over all workers.
        meetings: where workers meet by time; None where they meet by steps.
        scheduler: Megatron's, where workers may come to different places of the schedule; None otherwise.
    """

    def __init__(
        self,
        start: TrainStart,
        worker: Worker,
        account: RoundAccount,
        *,
        saved: dict[str, Any] | None,
        samples: int,
    ) -> None:
        """Prepare; the worker's weights are those that training begins with.

        Args:
            start: of training.
            worker: of this rank.
            account: takes what rounds report.
            saved: what `MeetingLoop.state` returned for the checkpoint that was loaded; None where there is none.
            samples: of the data, after which a worker's walk begins again; 0 where this rank reads none.
        """
        config = LocalSGDConfig.from_args(start.args)
        self._worker, self._engine, self._model = worker, worker.engine, start.model
        self.in_warmup = False
        self._account = account
        account.begin(start.args, start.model)
        self._iteration = 0
        self._last_iteration = last_step(start.args.train_iters, start.args.iterations_to_skip)
        self.scheduler = start.scheduler if may_skip_steps(start.args) and not config.use_async else None
        self._arrivals: Arrivals | None = None
        self._will_wait = False
        if config.sync_in_forward:
            self._arrivals = Arrivals(self._engine, worker.values)
            forward.wait_before_use(start.model, self._arrivals.require)
        self.meetings: MeetingLoop | None = None
        if config.use_async:
            self.meetings = MeetingLoop(
                start,
                config,
                groups=worker.groups,
                engine=self._engine,
                values=worker.values,
                saved=saved,
                samples=samples,
            )

    def begin_step(self, step: StepStart) -> None:
        """Decide whether this step is synchronous; take the anchor before the first one that is not."""
        engine = self._engine
        # Once over it stays so, also where a peer of a sync service has gone back: workers' moments differ by then.
        self.in_warmup = engine.in_warmup and step.iteration < engine.config.local_sgd_warmup_steps
        if not self.in_warmup and engine.in_warmup:
            engine.take_anchor()
        if self.meetings is not None and not self.in_warmup:
            self.meetings.begin()

    def another_step(self, made: int) -> bool:
        """Return whether this worker makes one more step before the next meeting."""
        return self.meetings is not None and not self.in_warmup and self.meetings.another_step(made)

    def end_step(self, step: StepEnd) -> None:
        """Count the step and run what is due of rounds; the last step makes workers equal that rounds do not."""
        self.conclude()
        self._iteration = step.iteration
        self._account.count(step.steps if step.completed else 0)
        if not step.completed:
            return
        if self.in_warmup:
            if self.meetings is not None:
                self.meetings.count_together(step)
        elif self.meetings is not None:
            self._meet(self.meetings, step)
        else:
            self._advance(step)

    def _meet(self, meetings: MeetingLoop, step: StepEnd) -> None:
        """Meet the other workers, and make a round if they have made steps enough."""
        with _timed():
            meeting = meetings.meet(step)
            if meeting.makes_round:
                progress = self._engine.sync(meeting.since_round)
                self._worker.values.refresh()
                self._worker.settle(self.scheduler)
                self._take(progress)

    def _advance(self, step: StepEnd) -> None:
        """Count a step of this worker, and run what is due after it."""
        engine = self._engine
        due = engine.count_step()
        last = engine.drifts and step.iteration + 1 == self._last_iteration
        if not due and not last:
            return
        with _timed():
            progress = engine.finish() if last else engine.advance()
            if progress.changed:
                self._worker.values.refresh()
            elif self._arrivals is not None:
                self._arrivals.expect()
            if engine.met:
                self._worker.settle(self.scheduler)
        self._take(progress)
        if self._arrivals is not None and self._arrivals.open and not self._all_will_wait():
            self.conclude()

    def _all_will_wait(self) -> bool:
        """Return whether the next forward pass of every worker can end a round; they get ready once and for all."""
        if not self._will_wait:
            ready = torch.tensor(float(forward.will_wait(self._model)), device=self._engine.device)
            dist.all_reduce(ready, op=dist.ReduceOp.MIN, group=self._worker.groups.across)
            self._will_wait = bool(ready)
        return self._will_wait

    def conclude(self) -> None:
        """End a round that was to end in the forward pass."""
        if self._arrivals is None or not self._arrivals.open:
            return
        complete = self._arrivals.close()
        progress = self._engine.conclude()
        if not complete:
            self._worker.values.refresh(now=True)
        self._take(progress)

    def collect(self) -> None:
        """Report rounds that have had their outer step since they were last asked for; the run may end here."""
        self._take(self._engine.collect())

    def _take(self, progress: WorkerProgress) -> None:
        """Repair and report what rounds after the last iteration did."""
        _account_for(self._worker, self._account, progress, self._iteration)


def meet_early(worker: Worker, account: RoundAccount, iteration: int, scheduler: Any) -> None:
    """Let workers that differ meet in the middle of their interval; training need not have started.

    Args:
        worker: of this rank.
        account: takes what the round reports.
        iteration: after which they meet.
        scheduler: see `JobRounds`.
    """
    into = plural(worker.engine.steps_since_sync, "step")
    progress = worker.engine.finish()
    worker.values.refresh()
    worker.settle(scheduler)
    _account_for(worker, account, progress, iteration)
    say(f"local SGD: the workers meet {into} into their interval, for the job's round with its peers")


def _account_for(worker: Worker, account: RoundAccount, progress: WorkerProgress, iteration: int) -> None:
    if progress.healed:
        # It continues from the synced weights; its moments would spoil them in the next step.
        worker.values.reset_non_finite_moments()
    account.take(progress.reports, iteration, is_debug=worker.engine.config.is_debug)


@contextmanager
def _timed() -> Iterator[None]:
    """Count the time under Megatron's timer of rounds."""
    from megatron.training import get_timers

    timer = get_timers()(ROUND_TIMER, log_level=1)
    timer.start()
    yield
    timer.stop()
