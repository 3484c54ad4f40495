# SPDX-License-Identifier: Apache-2.0
"""A simulated job from its settings, and its baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_ext.errors import combine
from megatron_ext.local_sgd.combinations import method_problems
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.streaming import StreamingConfig, assign_fragments, fragment_problem, layer_count
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.places import Where
from megatron_ext.outer.reducer_config import GTAConfig
from megatron_ext.phrases import plural, short_number
from megatron_ext.simulate.event_limits import MOST_EVENTS, longer_than_run, too_many
from megatron_ext.simulate.fleet import SimulatedFleet
from megatron_ext.simulate.job_run import SimulatedJob, SimulatedRun, run_job
from megatron_ext.simulate.local_sgd_job import LocalSGDJob
from megatron_ext.simulate.step_timer import StepTimer
from megatron_ext.simulate.synchronous_job import SynchronousJob
from megatron_ext.simulate.timed_job import TimedJob
from megatron_ext.simulate.training_work import SimulatedTraining
from megatron_ext.simulate.worker_links import WorkerLinks

__all__ = ["JobSetup"]


@dataclass(frozen=True, kw_only=True)
class JobSetup:
    """Everything that decides how long a job takes."""

    fleet: SimulatedFleet
    """The workers."""

    training: SimulatedTraining
    """What they train."""

    units: Mapping[str, int]
    """Values of every unit of the model, in model order."""

    local_sgd: LocalSGDConfig
    """When workers meet, and in which codec."""

    streaming: StreamingConfig
    """Fragments and delay."""

    def check(self) -> None:
        """Refuse what cannot be, or what the run itself would refuse.

        Raises:
            UserError: naming every setting.
        """
        found = (
            self._field_problems()
            or self.training.model_problems(self.parameters, self.fleet.worker_gpus)
            or self._schedule_problems()
            or self._too_long()
        )
        if found:
            raise combine(found, "simulate")

    def _field_problems(self) -> list[str]:
        """Return what cannot be, whatever the others are."""
        found = self.fleet.problems() + self.training.problems() + self.local_sgd.problems()
        found += method_problems(
            self.local_sgd, OuterOptimizerConfig(), GTAConfig(), self.streaming, Where.JOB
        )
        layers = layer_count(list(self.units))
        too_many_parts = fragment_problem(self.streaming.fragments, layers, "the model's layers,")
        return found if too_many_parts is None else [*found, too_many_parts]

    def _schedule_problems(self) -> list[str]:
        """Return what does not fit into the run."""
        if self.local_sgd.use_async:
            return self._problems_by_time() or self._save_problems()
        steps, warmup = self.training.steps, self.local_sgd.local_sgd_warmup_steps
        if warmup >= steps:
            return [f"--local-sgd-warmup-steps {warmup} leaves no local step of --steps {steps}; lower it"]
        if self.local_sgd.local_sgd_sync_interval > steps - warmup:
            return [
                f"--local-sgd-sync-interval {self.local_sgd.local_sgd_sync_interval} is longer than the run's "
                f"{plural(steps - warmup, 'local step')}, so that no round falls into it; lower it or raise --steps"
            ]
        return self._save_problems()

    def _save_problems(self) -> list[str]:
        """Return why checkpoints would have no effect."""
        fleet = self.fleet
        if not fleet.save_interval:
            return []
        if not (fleet.save_seconds or fleet.mtbf_hours or self.streaming.in_background or self.streaming.eager):
            return ["--save-interval has no effect without --save-seconds or --mtbf-hours; give one or drop this"]
        if fleet.save_interval > self._iterations:
            length = plural(self._iterations, "round" if self.local_sgd.use_async else "step")
            return [
                f"--save-interval {short_number(fleet.save_interval)} is longer than the run's {length}, so that no "
                "checkpoint falls into it; lower it or raise --steps"
            ]
        return []

    def _problems_by_time(self) -> list[str]:
        """Return what does not fit into a run whose workers meet by time."""
        config, steps = self.local_sgd, self.fleet.workers * self.training.steps
        found = []
        if config.local_sgd_warmup_steps:
            found.append("--local-sgd-warmup-steps with --local-sgd-use-async is not simulated; drop one of them")
        found += longer_than_run("--local-sgd-sync-time", config.local_sgd_sync_time, self._seconds)
        if config.min_total_global_steps > steps:
            found.append(
                f"--local-sgd-min-total-global-steps {config.min_total_global_steps} is more than the {steps} steps of "
                "all workers together, so that no round falls into the run; lower it or raise --steps"
            )
        return found

    def _too_long(self) -> list[str]:
        """Return why the simulation would not end in minutes."""
        config, parts, steps = self.local_sgd, self.streaming.fragments, self.training.steps
        interval, save_interval = config.local_sgd_sync_interval, self.fleet.save_interval
        found = []
        if config.use_async:
            windows = min(self._seconds / config.local_sgd_sync_time, steps)
            found += too_many(f"--local-sgd-sync-time {config.local_sgd_sync_time:g}", windows, "rounds")
        else:
            rounds = (steps - config.local_sgd_warmup_steps) // interval * parts
            what = "rounds of fragments" if parts > 1 else "rounds"
            found += too_many(f"--local-sgd-sync-interval {interval}", rounds, what)
            if interval * parts > MOST_EVENTS:
                found.append(
                    f"--local-sgd-sync-interval {interval} with {plural(parts, 'fragment')} is too long to be "
                    f"simulated; their product is {MOST_EVENTS} at most"
                )
        if save_interval:
            found += too_many(f"--save-interval {save_interval}", self._iterations // save_interval, "checkpoints")
        return found

    @property
    def _iterations(self) -> int:
        """Of the run, in which checkpoints are counted: its steps, or about as many rounds as it has time for."""
        if not self.local_sgd.use_async:
            return self.training.steps
        return min(math.ceil(self._seconds / self.local_sgd.local_sgd_sync_time), self.training.steps)

    @property
    def _seconds(self) -> float:
        """Of the training of the whole run."""
        return StepTimer(self.fleet, self.step_seconds).run_seconds(self.training.steps)

    @property
    def parameters(self) -> int:
        """Of the model."""
        return sum(self.units.values())

    @property
    def step_seconds(self) -> float:
        """Of a worker of average speed."""
        return self.training.seconds(self.parameters, self.fleet.worker_gpus)

    def run(self) -> SimulatedRun:
        """Return what becomes of the run.

        Raises:
            UserError: it does not end.
        """
        timer, links = StepTimer(self.fleet, self.step_seconds), WorkerLinks(self.fleet)
        job: SimulatedJob
        if self.local_sgd.use_async:
            job = TimedJob(
                timer,
                links,
                self.local_sgd,
                workers=self.fleet.workers,
                parameters=self.parameters,
                jitter=self.fleet.jitter,
                steps=self.training.steps,
                round_work=self.training.round_work,
            )
        else:
            job = LocalSGDJob(
                timer,
                links,
                self.local_sgd,
                self.streaming,
                workers=self.fleet.workers,
                fragments=self.fragments(),
                step_seconds=self.step_seconds,
                steps=self.training.steps,
                round_work=self.training.round_work,
            )
        return run_job(job, self.fleet, self.training.step_tokens)

    def baseline(self) -> SimulatedRun:
        """Return what becomes of synchronous training with the same workers.

        Raises:
            UserError: it does not end.
        """
        fleet = self.fleet
        if fleet.save_interval:  # after as much training, where rounds are counted
            every = round(fleet.save_interval * self.training.steps / self._iterations)
            fleet = replace(fleet, save_interval=max(every, 1))
        job = SynchronousJob(
            StepTimer(self.fleet, self.step_seconds),
            WorkerLinks(self.fleet),
            workers=self.fleet.workers,
            parameters=self.parameters,
            step_seconds=self.step_seconds,
            steps=self.training.steps,
        )
        return run_job(job, fleet, self.training.step_tokens)

    def fragments(self) -> list[int]:
        """Return the number of values of every fragment."""
        members = assign_fragments(list(self.units), self.streaming.fragments, self.streaming.pattern)
        return [sum(self.units[unit] for unit in units) for units in members]
