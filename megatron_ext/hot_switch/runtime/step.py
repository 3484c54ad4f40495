# SPDX-License-Identifier: Apache-2.0
"""The training step: the guests one after the other, then home, whose gradients end as those of all of them.

Home's optimizer, clipping and everything else in Megatron's step find home's gradient buffers as they would be if
home had trained the whole global batch: summed over its tokens, and divided by their number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_ext.hot_switch.data.batches import BatchReader, GlobalBatch
from megatron_ext.hot_switch.data.micro_batches import MicroBatches
from megatron_ext.hot_switch.data.row_parts import own_positions
from megatron_ext.hot_switch.data.rows import PackedBatch
from megatron_ext.hot_switch.runtime.expert_counts import ExpertCounts
from megatron_ext.hot_switch.runtime.guest import Guest, held_tensors
from megatron_ext.hot_switch.runtime.loss_checks import LossChecks
from megatron_ext.hot_switch.runtime.losses import GuestLosses
from megatron_ext.hot_switch.runtime.placed_model import PlacedModel
from megatron_ext.hot_switch.runtime.prediction_losses import PredictionReport
from megatron_ext.hot_switch.runtime.router_losses import RouterReport
from megatron_ext.hot_switch.transfer.flat_tensors import FlatTensors
from megatron_ext.hot_switch.transfer.switch_log import SwitchLog
from megatron_ext.run_options import run_options
from megatron_ext.seams.router import metrics_apart

__all__ = ["SwitchingStep", "WorkerPlace"]

_APART = 10_007
"""Between the seeds of two guests: Megatron adds small numbers of its own for every rank and stage."""

Losses = list[dict[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerPlace:
    """The worker that this rank belongs to, in a run whose job is one worker unless local SGD cuts it."""

    index: int
    """Its number, from 0."""

    count: int
    """Number of workers. Each trains its own share of every global batch."""

    group: Any
    """Process group of its ranks."""


class SwitchingStep:
    """Runs the forward and backward passes of training steps.

    Attributes:
        last_batch: this worker's share of the last step's global batch, None before there was one.
        lengths: predicted tokens of each sequence of that global batch.
        switches: those of the last step.
    """

    def __init__(
        self,
        home: PlacedModel,
        guests: Sequence[Guest],
        reader: BatchReader,
        worker: WorkerPlace,
        *,
        profiles: bool = False,
    ) -> None:
        """Prepare the steps.

        Args:
            home: the model that Megatron trains.
            guests: in the order in which they run.
            reader: of the global batches.
            worker: this rank's.
            profiles: whether to wait around each switch, for the device and for all parameters, so that times are
                those of moving.
        """
        self._home = home
        self._guests = guests
        self._reader = reader
        self._routers = RouterReport(home.config, home.device)
        self._worker = worker
        self._predictions = PredictionReport(home.config, home.device)
        self._losses = GuestLosses(home.device, worker.group, self._routers, self._predictions)
        self._checks = LossChecks()
        self._counts = ExpertCounts(home, worker.group)
        self._guests_ran = False
        # Memory for them is there from the first that arrive until home has added them.
        self._sums = home.gradient_sums() if guests else FlatTensors({}, home.device)
        self._has_sums = False
        self.last_batch: GlobalBatch | None = None
        self.lengths: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.switches = SwitchLog(home.device, waits=profiles)
        self._profiles = profiles

    def install(self, config: Any) -> None:
        """Make home's gradients the sum of all strategies', through the hook that Megatron offers.

        Args:
            config: home's `TransformerConfig`.
        """
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads

        inner = config.finalize_model_grads_func or finalize_model_grads

        @functools.wraps(inner)
        def finalize(
            model: list[Any], num_tokens: torch.Tensor | None = None, pg_collection: Any = None, **kwargs: Any
        ) -> None:
            assert num_tokens is not None, "hot switching needs --calculate-per-token-loss"
            if self._guests_ran and self._home.is_last_stage and self._home.adds_for_all:
                # Megatron adds up what the last stage counted, over replicas and parts of rows.
                num_tokens += self._losses.tokens.to(num_tokens.dtype)
            if self._guests_ran and self._counts.active:
                self._counts.give()
            inner(model, num_tokens, pg_collection=pg_collection, **kwargs)
            if self._guests_ran:
                self._add_guests_gradients(num_tokens)
            sharing = self._home.strategy.dp * self._home.strategy.cp
            self._predictions.finish(num_tokens, sharing, adds=self._home.adds_for_all)

        config.finalize_model_grads_func = finalize

    def run(self, original: Callable[..., Any], **call: Any) -> Losses:
        """Take the place of Megatron's schedule in a training step.

        Args:
            original: home's schedule.
            call: what the step calls it with.

        Returns:
            The losses of home's micro-batches, and on home's last stage those of the guests as one more.
        """
        from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
        args = run_options()
        # Of this step: a schedule may make steps larger, and --decrease-batch-size-if-needed smaller, than was asked.
        size: int = get_current_running_global_batch_size()
        consumed, share = args.consumed_train_samples, size // self._worker.count
        batch = self.last_batch = self._reader.plan(consumed + self._worker.index * share, share)
        self.lengths = self._reader.positions(consumed, size)
        seed = args.seed + 1_000_003 * (args.curr_iteration + 1)
        call["forward_step_func"] = self._checks.applied_to(call["forward_step_func"])
        self._run_guests(batch, call["forward_step_func"], seed)
        part = batch.parts[0]
        assert part is not None
        micro_batches = self._reader.read(batch, 0, self._home.replica)
        turn, reading = self._home.turn(part.row_length, micro_batches, seed), self._reading(self._home, micro_batches)
        with turn, reading as iterators:
            call["data_iterator"], call["num_microbatches"] = iterators, part.count
            call["seq_length"], call["micro_batch_size"] = part.row_length, self._home.strategy.micro_batch_size
            losses: Losses = original(**call)
        self._checks.finish()
        if self._routers.names:
            self._routers.finish(batch.trained_micro_batches, self._home.strategy.dp)
        if self._guests_ran and self._home.is_last_stage:
            losses.append(self._losses.for_home(losses[0], counts=self._home.adds_for_all))
        return losses

    def _run_guests(self, batch: GlobalBatch, forward_step: Any, seed: int) -> None:
        """Let every guest with data train, and collect gradients, tokens and losses."""
        self.switches.start()
        self._routers.start()
        self._predictions.start()
        self._guests_ran = any(part is not None for part in batch.parts[1:])
        if not self._guests_ran:
            return
        self._home.gather_parameters()
        self._losses.start()
        self._counts.start()
        source: dict[str, torch.Tensor] = {}
        before: tuple[int, Guest] | None = None
        for number, guest in enumerate(self._guests, 1):
            part = batch.parts[number]
            if part is None:
                continue
            follows = guest.may_follow and before is not None and before[0] == number - 1
            if not follows:
                _give_back(before)
                source = held_tensors(self._home.view)
            origin, plan = "home", guest.from_home
            if follows and guest.from_before is not None and before is not None:
                origin, plan = before[1].strategy.label, guest.from_before
            with self.switches.timed(f"parameters {origin} -> {guest.strategy.label}", plan):
                source = guest.borrow(source, from_home=not follows, at_once=self._profiles)
            if follows:
                _give_back(before)
            before = number, guest
            micro_batches = self._reader.read(batch, number, guest.replica)
            turn = guest.training(part.row_length, micro_batches, self._home.config, seed + _APART * number)
            reading = self._reading(guest, micro_batches)
            predicting = self._predictions.apart(counts=guest.reports)
            with turn, metrics_apart() as of_routers, predicting, reading as iterators:
                losses = _forward_backward(guest, forward_step, part.row_length, iterators, part.count)
            if not follows:
                self.switches.prolong(guest.seconds_of_arrival)
            self._routers.add(of_routers, guest.strategy.tp * guest.strategy.cp)
            if self._counts.active:
                self._counts.take(guest)
            if guest.reports:
                self._losses.add(losses, guest.counted_tokens)
            self._send_gradients(batch, number, guest)
        _give_back(before)
        self._losses.finish()

    @contextlib.contextmanager
    def _reading(self, model: PlacedModel, micro_batches: list[PackedBatch]) -> Iterator[Any]:
        """Yield what the schedule takes micro-batches from in the turn of a model, and see that it does."""
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        self._checks.begin([own_positions(batch.loss_mask, group) for batch in micro_batches])
        iterators = [MicroBatches(micro_batches) for _ in model.chunks]
        try:
            yield iterators if len(iterators) > 1 else iterators[0]
        except (StopIteration, RuntimeError):  # a generator of the user's makes the other of the one
            for iterator in iterators:
                iterator.require_no_more()
            raise
        for chunk in model.reading_chunks:
            iterators[chunk].require_end()

    def _send_gradients(self, batch: GlobalBatch, number: int, guest: Guest) -> None:
        """Send a guest's gradients, and those that it got itself, on to the next guest or home."""
        title = f"gradients {guest.strategy.label} -> "
        if number < len(self._guests) and batch.parts[number + 1] is not None:
            after = self._guests[number]
            if after.takes_gradients and after.gradients_from_before is not None:
                with self.switches.timed(title + after.strategy.label, after.gradients_from_before, gradients=True):
                    guest.pass_gradients_on(after)
                return
        if not self._has_sums:
            self._sums.take_zeros()
            self._has_sums = True
        with self.switches.timed(title + "home", guest.to_home, gradients=True):
            guest.send_gradients(self._sums.views)

    @torch.no_grad()
    def _add_guests_gradients(self, num_tokens: torch.Tensor) -> None:
        """Add the guests' gradients to home's, which are reduced and divided by the number of tokens already."""
        sums = self._sums.views
        torch._foreach_mul_(list(sums.values()), 1.0 / num_tokens.clamp(min=1))
        gradients = self._home.gradients()
        torch._foreach_add_([gradients[name] for name in sums], list(sums.values()))
        self._sums.give_up()
        self._has_sums = False


def _give_back(guest: tuple[int, Guest] | None) -> None:
    if guest is not None:
        guest[1].give_back()


def _forward_backward(guest: Guest, forward_step: Any, row_length: int, iterators: Any, count: int) -> Losses:
    """Run the schedule of the layout in place."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    losses: Losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators,
        model=guest.chunks,
        num_microbatches=count,
        seq_length=row_length,
        micro_batch_size=guest.strategy.micro_batch_size,
        decoder_seq_length=None,
        forward_only=False,
    )
    return losses
