# SPDX-License-Identifier: Apache-2.0
"""Local SGD on a list of fp32 tensors: its rounds, as the schedule asks for them, and their state.

The engine knows tensors and process groups, not Megatron: it is given the authoritative fp32 values of this rank
(with the distributed optimizer its shard, so anchor, outer state and traffic are sharded too).

Plain DiLoCo moves the whole model at the end of every interval. Streaming DiLoCo (arXiv 2501.18512, Algorithm 2) cuts
it into fragments, each with a step of the interval at which its round begins; the result is applied tau steps later,
mixed with what the worker has learned in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.equal_weights import require_equal
from megatron_ext.local_sgd.exchange.fragment import Fragment
from megatron_ext.local_sgd.exchange.host_memory import require_room
from megatron_ext.local_sgd.exchange.outer_state import OuterState, SyncedTensor
from megatron_ext.local_sgd.reporting.round_report import RoundReport, WorkerProgress
from megatron_ext.local_sgd.schedule import RoundSchedule
from megatron_ext.local_sgd.streaming import StreamingConfig, assign_fragments
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.reducer_config import GTAConfig
from megatron_ext.transport.collectives import collective_device

__all__ = ["LocalSGD", "SyncedTensor"]


class LocalSGD:
    """The state of local SGD on one rank, and its rounds.

    Attributes:
        device: where the values are, and what is added up over ranks.
    """

    def __init__(
        self,
        synced: Sequence[SyncedTensor],
        *,
        units: Sequence[str],
        config: LocalSGDConfig,
        outer: OuterOptimizerConfig,
        gta: GTAConfig,
        across: Any,
        inside: Any,
        streaming: StreamingConfig | None = None,
        observe: bool = False,
    ) -> None:
        """Prepare; no memory is taken before the anchor is.

        Args:
            synced: authoritative fp32 tensors of this rank; the same names and shapes on all ranks of `across`.
            units: every unit of the model in model order; the same on all ranks, also where a rank holds no
                tensor of a unit.
            config: schedule, workers and penalty.
            outer: the outer optimizer.
            gta: how pseudo-gradients become one.
            across: process group of the ranks that hold the same values, one per worker, in worker order.
            inside: process group of all ranks of this worker; None when it is this one alone.
            streaming: fragments, and how rounds overlap with training; by default the whole model at once.
            observe: compare every pseudo-gradient with the outer momentum, for the report.

        Raises:
            UserError: the host has no room for what is to be kept there.
        """
        self.config = config
        self.outer = outer
        self.gta = gta
        self.synced_tensors = tuple(synced)
        self.values = [entry.tensor for entry in synced]
        self.streaming = streaming or StreamingConfig()
        self.rounds = 0
        self.in_warmup = True
        self.met = False
        self._equal = True
        self._healed = False
        self._apart = self.gta.in_pairs or self.streaming.eager
        self._across = across
        self._worker = dist.get_rank(across)
        self.device = self.values[0].device if self.values else collective_device(across)
        self._schedule = RoundSchedule(
            self.streaming.fragments,
            interval=config.local_sgd_sync_interval,
            delay=self.streaming.sync_delay,
            eager=self.streaming.eager,
        )
        self._reports: list[RoundReport] = []
        self._fragments: list[Fragment] = []
        self._members: list[list[int]] = []
        for index, within in enumerate(assign_fragments(units, self.streaming.fragments, self.streaming.pattern)):
            members = [place for place, entry in enumerate(synced) if entry.unit in within]
            fragment = Fragment(
                [synced[place] for place in members],
                units=within,
                config=config,
                outer=outer,
                gta=gta,
                across=across,
                inside=inside,
                device=self.device,
                index=index,
                fragments=self.streaming.fragments,
                guarded=self.streaming.in_background or config.use_async,
                eager=self.streaming.eager,
                observe=observe,
            )
            self._fragments.append(fragment)
            self._members.append(members)
        require_room(sum(fragment.state.offloaded_bytes for fragment in self._fragments))

    @property
    def fragments(self) -> Sequence[Fragment]:
        """What rounds move, each by itself; one where the model is not cut."""
        return tuple(self._fragments)

    @property
    def steps_since_sync(self) -> int:
        """Inner steps of the interval that lie behind."""
        return self._schedule.steps

    @property
    def synced(self) -> bool:
        """Whether all workers hold the same values now: in warm-up, or right after a round of the whole model."""
        return self.in_warmup or self._equal

    @property
    def drifts(self) -> bool:
        """Whether workers differ after a round too, so that `finish` has to make them equal in the end."""
        return self.streaming.active or self._apart

    @torch.no_grad()
    def take_anchor(self) -> None:
        """Remember the present values, which must be equal on all workers, as the anchor; warm-up ends.

        Raises:
            RuntimeError: they are not equal, so that there is nothing for the workers to agree on.
        """
        require_equal([(each.name, each.tensor) for each in self.synced_tensors], self._across, self.device)
        self.in_warmup = False
        self._schedule.restart()
        for fragment in self._fragments:
            fragment.state.begin()

    def move_anchor(self) -> None:
        """Continue from the present values, which must be equal on all workers; the outer optimizer keeps its state.

        Raises:
            RuntimeError: they are not equal.
        """
        require_equal([(each.name, each.tensor) for each in self.synced_tensors], self._across, self.device)
        self._equal = True
        self._schedule.restart()
        for fragment in self._fragments:
            fragment.state.move_to_values()

    def count_step(self) -> bool:
        """Count one inner step of all workers, skipped updates included; return whether `advance` has to be called."""
        schedule = self._schedule
        schedule.count()
        self._equal = self.met = False
        return any(
            self._is_turning(index) or schedule.begins(index) or schedule.answers(index)
            for index in range(len(self._fragments))
        )

    def count_meeting(self, steps: int) -> None:
        """Note that all workers meet, before any round.

        Args:
            steps: since the last round, of the worker that has made the most.
        """
        self._schedule.steps = steps
        self._equal, self.met = False, True

    @torch.no_grad()
    def advance(self) -> WorkerProgress:
        """Do what the step that was just counted asks for: begin, turn and end rounds.

        Raises:
            RuntimeError: see `Fragment.sync`.
        """
        if self.config.sync_in_forward:
            return self._launch()
        if not self.streaming.active:
            return self.sync()
        schedule = self._schedule
        ended, non_finite = list[Fragment](), set[int]()
        for index, fragment in enumerate(self._fragments):
            if schedule.answers(index):
                fragment.turn_late()
            if self._is_turning(index) and fragment.phase == "sending":
                self._reports.append(fragment.turn())
            if fragment.phase != "idle" and schedule.ends(index):
                non_finite |= self._end(fragment)
                ended.append(fragment)
        for index, fragment in enumerate(self._fragments):
            if not schedule.begins(index):
                continue
            if not self.streaming.in_background:
                non_finite |= self._sync(fragment)
                ended.append(fragment)
                continue
            self.rounds += 1
            fragment.send(self.rounds)
            schedule.launch(index)
            if schedule.ends(index):
                non_finite |= self._end(fragment)
                ended.append(fragment)
        if non_finite:
            self._reset_to_anchor(non_finite, ended)
        schedule.end_of_step()
        return self._progress(changed=bool(ended))

    def _reset_to_anchor(self, workers: Set[int], ended: Sequence[Fragment]) -> None:
        """Let workers that were left out of the rounds of some fragments continue from the anchor in the others as
        well.

        Non-finite values in one of them would spoil the rest in the next step, before its own round comes.
        """
        for fragment in self._fragments:
            if fragment not in ended:
                self._land(fragment)
                fragment.go_back(workers)

    @torch.no_grad()
    def sync(self, steps: Sequence[int] | None = None) -> WorkerProgress:
        """End what is in flight, then run a round of the whole model at once.

        Args:
            steps: how many every worker has made since the last round, where they differ.

        Raises:
            RuntimeError: see `Fragment.sync`.
        """
        for fragment in self._fragments:
            if fragment.phase != "idle":
                self._end(fragment)
        for fragment in self._fragments:
            self._sync(fragment, steps)
        self._schedule.restart()
        self._equal = not self._apart
        return self._progress(changed=True)

    def _launch(self) -> WorkerProgress:
        """Begin a round of the whole model that ends in the next forward pass."""
        for fragment in self._fragments:
            self.rounds += 1
            self._take(fragment.launch(self.rounds))
        self._schedule.restart()
        self._equal = self.met = True
        return self._progress(changed=False)

    @torch.no_grad()
    def land(self, units: Sequence[str]) -> None:
        """Wait until the results of these units are among the values, where a round is to end in the forward pass."""
        for fragment in self._fragments:
            fragment.land(units)

    @torch.no_grad()
    def conclude(self) -> WorkerProgress:
        """End a round that was to end in the forward pass; all ranks must call it at the same place.

        Raises:
            RuntimeError: see `Fragment.sync`.
        """
        for fragment in self._fragments:
            self._take(fragment.conclude())
        return self._progress(changed=True)

    @torch.no_grad()
    def finish(self) -> WorkerProgress:
        """Make all workers equal, as at the end of training: end what is in flight, then take the mean of all.

        There is no outer step: it would move the weights by its momentum once more, on next to no new gradient.

        Raises:
            RuntimeError: see `Fragment.unite`.
        """
        for fragment in self._fragments:
            if fragment.phase != "idle":
                self._end(fragment)
        for fragment in self._fragments:
            self._healed |= not fragment.unite()
        self._schedule.restart()
        self._equal = self.met = True
        return self._progress(changed=True)

    def _sync(self, fragment: Fragment, steps: Sequence[int] | None = None) -> set[int]:
        """Run a round of a fragment at once; return the workers with non-finite values."""
        self.rounds += 1
        report = fragment.sync(self.rounds, steps)
        self._take(report)
        self.met = True
        return set(report.non_finite)

    def _take(self, report: RoundReport | None) -> None:
        if report is not None:
            self._healed |= self._worker in report.non_finite
            self._reports.append(report)

    def _is_turning(self, index: int) -> bool:
        """Return whether a round is half-way or at its end."""
        return self._fragments[index].phase != "idle" and self._schedule.turns(index)

    def _end(self, fragment: Fragment) -> set[int]:
        """Apply the result of a round in flight; return the workers with non-finite values."""
        self._land(fragment)
        non_finite = set(fragment.non_finite)
        self._healed |= self._worker in non_finite
        fragment.apply(self.streaming.update_alpha)
        self.met = True
        return non_finite

    def _land(self, fragment: Fragment) -> None:
        """Wait for the result of a round in flight."""
        if fragment.phase == "sending":
            self._reports.append(fragment.turn())
        if fragment.phase == "reduced":
            fragment.receive()

    def collect(self) -> WorkerProgress:
        """Return the reports of rounds that were turned early, by a save or an evaluation, and not returned yet."""
        return self._progress(changed=False)

    def _progress(self, changed: bool) -> WorkerProgress:
        progress = WorkerProgress(reports=self._reports, changed=changed, healed=self._healed)
        self._reports, self._healed = [], False
        return progress

    # State.

    @torch.no_grad()
    def tensor_state(self) -> dict[str, list[torch.Tensor]]:
        """Gather anchor and outer optimizer tensors from their owners; all ranks of `across` must call it.

        Rounds in flight are waited for first, which changes when they end, but not what they end with.

        Returns:
            Lists by name, in the order and shapes of the values; empty in warm-up.
        """
        if self.in_warmup:
            return {}
        for fragment in self._fragments:
            self._land(fragment)
        return self._gathered(OuterState.tensor_state)

    def _gathered(self, of: Callable[[OuterState], dict[str, list[torch.Tensor]]]) -> dict[str, list[torch.Tensor]]:
        """Put together what every fragment has."""
        found: dict[str, list[torch.Tensor]] = {}
        for fragment, members in zip(self._fragments, self._members, strict=True):
            for name, tensors in of(fragment.state).items():
                whole = found.setdefault(name, list(self.values))
                for place, tensor in zip(members, tensors, strict=True):
                    whole[place] = tensor
        return found

    def worker_state(self) -> dict[str, list[torch.Tensor]]:
        """Return this worker's own state besides its values, in their order and shapes, by name: with a codec what
        its messages lost, with pairs of workers its own anchor and outer state. Empty in warm-up.
        """
        return {} if self.in_warmup else self._gathered(OuterState.worker_state)

    @torch.no_grad()
    def gather_anchor(self) -> list[torch.Tensor]:
        """Return the values that all workers agreed on last, like the values; all ranks of `across` must call it.

        Rounds in flight are waited for first.
        """
        found = list(self.values)
        for fragment, members in zip(self._fragments, self._members, strict=True):
            self._land(fragment)
            for place, tensor in zip(members, fragment.state.gather_anchor(), strict=True):
                found[place] = tensor
        return found

    def scalar_state(self) -> dict[str, Any]:
        """Return the counters and what else is equal on all ranks; after `tensor_state`."""
        return {
            "rounds": self.rounds,
            "steps_since_sync": self.steps_since_sync,
            "in_warmup": self.in_warmup,
            "equal": self._equal,
            "fragments": [
                {
                    "left": self._schedule.left[index],
                    "on_its_way": fragment.phase != "idle",
                    "broken": fragment.non_finite,
                    **fragment.state.scalar_state(),
                }
                for index, fragment in enumerate(self._fragments)
                if not self.in_warmup
            ],
        }

    @torch.no_grad()
    def load(
        self,
        tensors: dict[str, list[torch.Tensor]],
        scalars: dict[str, Any],
        own: dict[str, list[torch.Tensor]] | None = None,
    ) -> None:
        """Take over a saved state; all ranks of `across` must call it.

        Args:
            tensors: as `tensor_state` returned them, perhaps with another number of workers.
            scalars: as `scalar_state` returned them.
            own: as `worker_state` returned it.
        """
        if not scalars["in_warmup"]:
            saved = zip(self._fragments, self._members, scalars["fragments"], strict=True)
            for index, (fragment, members, state) in enumerate(saved):
                parts = {name: [whole[place] for place in members] for name, whole in tensors.items()}
                mine = {name: [whole[place] for place in members] for name, whole in (own or {}).items()}
                fragment.state.load(parts, state, mine)
                self._schedule.left[index] = int(state["left"])
                if state["on_its_way"]:
                    fragment.resume(list(state["broken"]))
            self.in_warmup = False
        self._equal = bool(scalars["equal"])
        self.rounds = int(scalars["rounds"])
        self._schedule.resume(int(scalars["steps_since_sync"]))
