# SPDX-License-Identifier: Apache-2.0
"""Meetings in Megatron's loop: what its counters, its schedule, its intervals and its log make of inner steps."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_ext.hooks import StepEnd, TrainingLog, TrainStart
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.engine import LocalSGD
from megatron_ext.local_sgd.learning_rate import follow_all
from megatron_ext.local_sgd.meetings.config import MeetingsConfig, read_meetings
from megatron_ext.local_sgd.meetings.counts import Meeting, MeetingRecorder, Meetings
from megatron_ext.local_sgd.meetings.sample_intervals import SampleIntervals
from megatron_ext.seams.arguments import say
from megatron_ext.seams.logging import average_layer_metrics
from megatron_ext.seams.optimizer import InnerValues
from megatron_ext.worker_ending import is_told_to_end
from megatron_ext.worker_groups import WorkerGroups

__all__ = ["MeetingLoop"]


class MeetingLoop:
    """Keeps the loop right while workers make other numbers of steps.

    Attributes:
        batches: global batches that all workers together made in the last iteration.
    """

    def __init__(
        self,
        start: TrainStart,
        config: LocalSGDConfig,
        *,
        groups: WorkerGroups,
        engine: LocalSGD,
        values: InnerValues,
        saved: dict[str, Any] | None,
        samples: int,
    ) -> None:
        """Take over the loop's counters, which count all that lies behind.

        Args:
            start: of training.
            config: of local SGD.
            groups: of this run.
            engine: told of the meetings; the caller runs its rounds.
            values: of the inner optimizer.
            saved: what `state` returned, None where workers continue from one place.
            samples: of the data, after which a worker's walk begins again; 0 where this rank reads none.
        """
        args = self._args = start.args
        self._groups, self._engine, self._values = groups, engine, values
        self._model, self._scheduler = start.model, start.scheduler
        self._batch: int = args.global_batch_size
        options = MeetingsConfig.from_args(args)
        replay = options.local_sgd_replay_meetings
        self._meetings = Meetings(
            config,
            groups=groups,
            device=engine.device,
            batch=self._batch,
            samples=args.train_iters * self._batch,
            consumed=args.consumed_train_samples,
            saved=saved,
            replay=[] if replay is None else read_meetings(replay, groups.num_workers),
        )
        self._intervals = SampleIntervals(args)
        self._intervals.begin(args.iteration)
        self._recorder: MeetingRecorder | None = None
        if options.local_sgd_record_meetings is not None and dist.get_rank() == 0:
            self._recorder = MeetingRecorder(options.local_sgd_record_meetings, self._meetings.record)
        self._samples = samples
        self._place = self._scheduler.num_steps
        self.batches = 1.0
        self._last: list[int] = []
        self._made, self._skipped, self._non_finite = 0, 0, 0
        if self._meetings.finished:
            args.train_iters = args.iteration
            say(f"local SGD: all {args.consumed_train_samples} samples of this run lie behind; no step is left")

    @property
    def steps_since_round(self) -> int:
        """Steps of the worker that has made the most since the last round."""
        return max(self._meetings.since_round)

    def begin(self) -> None:
        """Begin an interval."""
        self._meetings.open()

    def another_step(self, made: int) -> bool:
        """Return whether one more step follows; then the weights of the one before are on all ranks of the worker."""
        if not self._meetings.another_step(made, told_to_end=is_told_to_end()):
            return False
        # Megatron lets forward passes gather weights only from its second iteration on.
        hooked = any(getattr(chunk, "remove_forward_pre_hook_handles", None) for chunk in self._model)
        if self._args.overlap_param_gather and not hooked:
            self._values.refresh(now=True)
        return True

    def count_together(self, step: StepEnd) -> None:
        """Count a step of all workers together, in warm-up."""
        self._meetings.count_together()
        self._place = self._scheduler.num_steps
        self._made, self.batches, self._last = step.steps, 1.0, [1] * self._groups.num_workers
        self._arm(step.iteration, self._args.consumed_train_samples)

    def meet(self, step: StepEnd) -> Meeting:
        """Wait for the other workers and bring all counters to what all of them have made."""
        places = list(self._meetings.places)
        meeting = self._meetings.meet(step.steps)
        args, workers = self._args, self._groups.num_workers
        self._engine.count_meeting(max(meeting.since_round))
        follow_all(self._scheduler, self._place, self._groups.across, self._engine.device)
        self._place = self._scheduler.num_steps
        before = args.consumed_train_samples
        # Megatron adds a global batch in every iteration.
        args.consumed_train_samples += (sum(meeting.steps) - workers) * (self._batch // workers)
        self.batches = sum(meeting.steps) / workers
        self._last, self._made = meeting.steps, step.steps
        self._skipped += step.skipped
        self._non_finite += step.non_finite
        if self._recorder is not None:
            self._recorder.write(meeting.steps)
        self._say_who_begins_again(places)
        if meeting.finished:
            args.train_iters = step.iteration + 1
        self._arm(step.iteration, before)
        return meeting

    def _arm(self, iteration: int, before: int) -> None:
        after = self._args.consumed_train_samples + self._batch
        last = iteration + 1 == self._args.train_iters
        self._intervals.arm(iteration + 1, before // self._batch, after // self._batch, last=last)

    def _say_who_begins_again(self, before: list[int]) -> None:
        if not self._samples:
            return
        for worker, (left, reached) in enumerate(zip(before, self._meetings.places, strict=True)):
            if reached // self._samples > left // self._samples:
                say(
                    f"local SGD: worker {worker} has read all of its slices of the data and begins them again; "
                    "--local-sgd-data-slack makes more data where a run begins"
                )

    def complete_log(self, log: TrainingLog) -> None:
        """Turn sums over inner steps into means, and say how many there were."""
        if self._made > 1:
            average_layer_metrics(self._made)
        self._made = 1  # what was averaged is not averaged again
        if not log.printing:
            return
        log.timed_iterations.append(max(self._intervals.since_line, 1))
        log.fields.append(("inner steps", f"{sum(self._last)} ({min(self._last)} to {max(self._last)} by worker)"))
        if self._skipped:
            log.fields.append(("skipped inner steps", f"{self._skipped} ({self._non_finite} non-finite)"))
            self._skipped = self._non_finite = 0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold."""
        return self._meetings.state()
