# SPDX-License-Identifier: Apache-2.0
"""The sync service as a feature of a Megatron run: the job is a peer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.hooks import (
    CutsSamples,
    Feature,
    GroupsBuilt,
    LoadContext,
    ModelBuilt,
    SaveContext,
    SavesState,
    SaveStart,
    StepEnd,
    TrainEnd,
    TrainingLog,
    TrainLeft,
    hooks,
    on,
)
from megatron_ext.patching import Patch
from megatron_ext.seams import checkpoint as checkpoint_seam
from megatron_ext.seams import logging, samples, training
from megatron_ext.seams.arguments import add_config_group, say
from megatron_ext.sync_service.megatron import checkpoint, index_cache
from megatron_ext.sync_service.megatron.arguments import SyncServiceConfig, argument_problems, notices
from megatron_ext.sync_service.megatron.catching_up import claim_of, resume_after
from megatron_ext.sync_service.megatron.job_agreement import telling_padding
from megatron_ext.sync_service.megatron.joining import Peer, join
from megatron_ext.sync_service.megatron.whole_run import count_schedule_in_own_samples, resume_in_part
from megatron_ext.sync_service.peer.background import ThreadedRound, uncounted, with_steps_since
from megatron_ext.worker_groups import WorkerGroups

if TYPE_CHECKING:
    from megatron_ext.sync_service.peer.client import RoundOutcome
    from megatron_ext.sync_service.peer.parts import Values

__all__ = ["SyncServiceFeature"]

_TIMER = "sync-service"
_LOSS = "lm loss"
"""What Megatron calls the loss of language models."""


class SyncServiceFeature(Feature, CutsSamples, SavesState):
    """Wires the client to Megatron's optimizer, loop, data, log and checkpoints."""

    name = "sync-service"

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._groups: WorkerGroups | None = None
        self._peer: Peer | None = None
        self._saved: dict[str, Any] | None = None
        self._begun: checkpoint.Begun | None = None
        self._ended: checkpoint.Place | None = None
        self._sample_parts: int | None = None
        self._residuals: dict[str, torch.Tensor] = {}

    # Arguments.

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the group of a peer's options."""
        add_config_group(parser, SyncServiceConfig, "sync service (local SGD across jobs)")

    def enabled(self, args: Any) -> bool:
        """Return whether this job is a peer."""
        return args.sync_service is not None

    def validate(self, args: Any) -> list[str]:
        """Check the options by themselves, and against the table of options."""
        self._reset()  # whatever a former run of this process was
        return argument_problems(args, self.name)

    def adjust_arguments(self, args: Any) -> list[str]:
        """Say what was chosen."""
        return notices(args)

    def required_patches(self) -> Sequence[Patch]:
        """Return the seams that a peer uses."""
        return [
            *training.model_patches(),
            *training.loop_patches(),
            *samples.patches(),
            *index_cache.patches(),
            *logging.patches(),
            *checkpoint_seam.patches(),
        ]

    def data_part(self, args: Any) -> tuple[int, int]:
        """Return which part of the samples is this peer's."""
        return (0, 1) if self._peer is None else (self._peer.client.index, self._peer.client.peers)

    # The run.

    @on(GroupsBuilt, always=False)  # workers of local SGD, if there are any
    def on_groups_built(self, event: GroupsBuilt) -> None:
        """Have workers inside the job."""
        self._groups = event.groups

    @on(ModelBuilt)
    def on_model_built(self, context: ModelBuilt) -> None:
        """Become a member, and take the values from which this job continues: before the data, which it cuts."""
        if context.args.skip_train or context.optimizer is None:
            return
        if self._saved is not None and _is_over(context.args):
            say(
                "sync service: the training that was loaded is over; this job takes no part in the run. Should the "
                "server still await it, `megatron-ext server evict` ends that"
            )
            self._ended = checkpoint.Place.of(self._saved, self._residuals)
            return
        if self._sample_parts is not None:
            resume_in_part(context.args, context.args.sync_service_peers, self._sample_parts)
        self._peer = peer = join(context, None if self._saved is None else self._saved["index"], self._groups)
        if self._saved is None and self._groups is not None:
            # What was loaded may be workers in the middle of an interval, as a job leaves them that was not a peer.
            hooks.meet_before_sharing(context.args.iteration)
            peer.values.refresh(now=True)
        if self._saved is not None:
            peer.job.on_all(lambda: checkpoint.check_residuals(self._residuals, peer.slices.parts))
            peer.client.residuals, self._residuals = self._residuals, {}
        claim = claim_of(context, self._begun, peer.interval, whole=self._saved is not None)
        with telling_padding(context.args):
            adopted = peer.client.begin(claim, {} if claim.whole else peer.slices.read())
        if adopted is not None:
            peer.slices.write(adopted)
            peer.values.refresh(now=True)
            hooks.follow_weights()
        peer.client.rest()
        if adopted is not None:
            if claim.whole:
                say(f"sync service: rounds were made after round {claim.round}, from which the checkpoint resumes")
            self._resume_at(context, peer)
        elif self._saved is not None:
            peer.interval.resume(self._saved["steps"], self._saved["seconds"])
        peer.round = peer.client.round
        place = f"{peer.interval.steps} steps after round {peer.client.round}"
        say(f"sync service: part {peer.client.index} of {peer.client.peers} of the samples, {place}")

    def _resume_at(self, context: ModelBuilt, peer: Peer) -> None:
        """Begin an interval with values other than the checkpoint's."""
        place, begun, index = peer.client.place, self._begun, peer.client.index
        assert place is not None  # the claim has said how far the training is
        if begun is not None and begun.index != index and peer.client.counted is None and place.samples:
            say(
                f"sync service: --load is the checkpoint of part {begun.index} of the samples; the first "
                f"{place.samples} of part {index}, of which no round has any, are left out"
            )
        would_train = not _is_over(context.args)
        resume_after(context, place)
        if self._saved is None and begun is None and would_train and _is_over(context.args):
            peer.client.leave()
            peer.client.close()
            raise UserError(
                f"--sync-service-run {context.args.sync_service_run}: part {index} of the samples is trained up to "
                f"iteration {place.iteration} in this run, and --train-iters is {context.args.train_iters}: this job, "
                "which has no checkpoint of the run, would train nothing; give a new experiment a run of another name"
            )
        peer.begin_interval()

    @on(StepEnd)
    def on_step_end(self, step: StepEnd) -> None:
        """Count the step, begin a round at the end of an interval, and apply one that is due."""
        peer = self._require_peer()
        if not step.completed:
            return
        is_over = peer.interval.count_step()
        if _LOSS in step.losses:
            peer.count_loss(step.losses[_LOSS])
        if peer.in_flight is not None and peer.interval.steps == peer.delay:
            self._arrive(peer)
        if is_over:
            hooks.meet_before_sharing(step.iteration)
        if is_over and peer.delay:
            self._set_out(peer)
        elif is_over:
            with _timed():
                tell = peer.report()
                outcome = peer.client.sync(peer.slices.read(frozen=False), tell(), peer.slices.frozen, peer.memory)
                self._continue(peer, outcome, outcome.values)
                peer.client.rest()
            peer.begin_interval()

    def _set_out(self, peer: Peer) -> None:
        """Let a thread make a round of the values as they are now."""
        values, tell = peer.slices.read(frozen=False, copy=True), peer.report()

        def make() -> RoundOutcome:
            try:
                return peer.client.sync(values, tell(), peer.slices.frozen, peer.memory)
            finally:
                peer.client.rest()

        interval = peer.interval.steps, peer.interval.seconds
        peer.begin_interval()
        peer.in_flight = ThreadedRound(make, values, interval)

    def _arrive(self, peer: Peer, *, now: bool = False) -> None:
        """Wait for the round in flight, and continue from it and the steps made since.

        Args:
            peer: with such a round.
            now: whether the model's parameters are needed before the next forward pass.
        """
        assert peer.in_flight is not None
        with _timed():
            outcome, peer.waited = peer.in_flight.wait()
            since, own = peer.in_flight.contributed, peer.slices.read(frozen=False)
            without = uncounted(peer.slices.parts, outcome)
            peer.in_flight = None
            self._continue(peer, outcome, with_steps_since(outcome.values, own, since, without), now=now)

    def _arrive_early(self, reason: str) -> None:
        """Apply the round in flight, if there is one, before it is due."""
        peer = self._peer
        if peer is not None and peer.in_flight is not None:
            steps = peer.interval.steps
            self._arrive(peer, now=True)
            say(f"sync service: {reason} applies round {peer.round} after {steps} of {peer.delay} steps")

    def _continue(self, peer: Peer, outcome: RoundOutcome, values: Values, *, now: bool = False) -> None:
        """Take the values that a round leads to."""
        peer.slices.write(values)
        peer.memory = outcome.values
        peer.values.refresh(now=now)
        hooks.follow_weights()
        peer.last, peer.round = replace(outcome, values={}), outcome.number
        if not outcome.contributed:
            # It continues from the others' weights; its moments would spoil them in the next step.
            peer.values.reset_non_finite_moments()
            say(f"sync service: round {outcome.number} went without this peer: {outcome.message or 'it came too late'}")
        for unit, reason in outcome.excluded.items():
            say(f"sync service: round {outcome.number} left this peer out of {unit}: {reason}")

    @on(TrainLeft)
    def on_train_left(self, event: TrainLeft) -> None:
        """Finish the round in flight where the run was asked to exit; leave it where the run has failed."""
        if isinstance(event.error, SystemExit):
            self._arrive_early("the exit")
        elif self._peer is not None and self._peer.in_flight is not None:
            self._peer.client.abandon()
            self._peer.in_flight.abandon()

    @on(TrainEnd)
    def on_train_end(self, event: TrainEnd) -> None:
        """End the membership: nobody has to wait for this job any more."""
        peer = self._peer
        if peer is None:
            return
        # Megatron saves the last checkpoint after this: whatever the server does, the job's own weights are kept.
        try:
            self._arrive_early("the end of training")
        except UserError as error:
            assert peer.in_flight is not None
            steps, seconds = peer.in_flight.interval
            peer.interval.resume(steps + peer.interval.steps, seconds + peer.interval.seconds)
            peer.in_flight = None
            say(f"sync service: the round in flight is lost, and training ends with this job's own weights: {error}")
        steps = peer.interval.steps
        if steps:
            say(f"sync service: training ends {steps} steps after round {peer.client.round}, with its own weights")
        try:
            peer.client.leave()
        except UserError as error:
            say(
                f"sync service: the server does not know that this peer has ended: {error}. Should it still await the "
                "peer, `megatron-ext server evict` ends that"
            )
        peer.client.close()
        self._ended, self._peer = self._place(peer), None

    @on(TrainingLog)
    def on_training_log(self, log: TrainingLog) -> None:
        """Report the last round."""
        peer = self._require_peer()
        log.timers.append(_TIMER)
        if log.printing:
            log.fields.append(("sync round", str(peer.round)))
            if peer.last is not None:
                if not peer.client.asynchronous:
                    log.fields.append(("peers", f"{len(peer.last.contributors)}/{peer.client.peers}"))
                log.fields.append(("sync MB up", f"{peer.last.sent / 1e6:.3f}"))
                log.fields.append(("down", f"{peer.last.received / 1e6:.3f}"))
                if peer.delay:
                    log.fields.append(("sync wait s", f"{peer.waited:.3f}"))
        if log.writing:
            log.scalars["sync-service/round"] = peer.round
            if peer.last is not None:
                log.scalars["sync-service/contributors"] = len(peer.last.contributors)
                log.scalars["sync-service/bytes-up"] = peer.last.sent
                log.scalars["sync-service/bytes-down"] = peer.last.received
                if peer.delay:
                    log.scalars["sync-service/seconds-waited"] = peer.waited

    # Checkpoints.

    @on(SaveStart)
    def on_save_start(self, event: SaveStart) -> None:
        """Apply a round that is in flight: a checkpoint has none."""
        self._arrive_early("the checkpoint")

    def save_state(self, context: SaveContext) -> None:
        """Say in the checkpoint where this peer is in its run."""
        if context.loading:
            checkpoint.request(context, self._saved)
        elif self._peer is not None:
            checkpoint.assemble(context, self._place(self._peer))
        elif self._ended is not None:
            checkpoint.assemble(context, self._ended)
        elif self._saved is not None:  # --ckpt-convert-format: Megatron saves what it has loaded, and ends
            checkpoint.assemble(context, checkpoint.Place.of(self._saved, self._residuals))

    def load_state(self, context: LoadContext) -> None:
        """Take over where the peer was, unless the checkpoint is of another run or of weights alone."""
        self._sample_parts = checkpoint.parts_of_samples(context)
        self._begun = checkpoint.begun(context)
        self._saved = checkpoint.take_state(context)
        if not context.common_only:
            self._residuals = checkpoint.take_residuals(context)
            if self._sample_parts == 1:
                count_schedule_in_own_samples(context)

    def check_load(self, context: LoadContext) -> None:
        """Say of what a peer's checkpoint has counted the samples."""
        line = checkpoint.samples_notice(context)
        if line is not None:
            say(line)

    def _place(self, peer: Peer) -> checkpoint.Place:
        return checkpoint.Place(
            index=peer.client.index,
            number=peer.client.round,
            digest=peer.client.digest,
            steps=peer.interval.steps,
            seconds=peer.interval.seconds,
            residuals=peer.client.residuals,
        )

    def _require_peer(self) -> Peer:
        assert self._peer is not None, "sync service: the model is not built yet"
        return self._peer


def _is_over(args: Any) -> bool:
    """Return whether a checkpoint was loaded after the last step; Megatron has made steps of samples by now."""
    return bool(args.iteration >= args.train_iters)


@contextmanager
def _timed() -> Iterator[None]:
    """Add to the timer of rounds."""
    from megatron.training import get_timers

    timer = get_timers()(_TIMER, log_level=1)
    timer.start()
    try:
        yield
    finally:
        timer.stop()
