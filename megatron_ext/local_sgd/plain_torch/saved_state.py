# SPDX-License-Identifier: Apache-2.0
"""What a saved state records about the run that saved it, and which runs may load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.agreement import gather_at, refuse_together
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.engine import SyncedTensor
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.local_sgd.taken_over import changes, method_of, refuse_other_method, refuse_other_model, tuning_of
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.digest import tensor_digest
from megatron_ext.outer.reducer_config import GTAConfig

__all__ = ["StateGuard"]

_WHERE = "local SGD's saved state"
_NEEDED = {"step", "common", "own", "scalars", "schedule", "method", "parameters"}


class StateGuard:
    """Describes a run in the states that it saves, and lets only states in that fit it."""

    def __init__(
        self,
        synced: Sequence[SyncedTensor],
        *,
        units: Sequence[str],
        config: LocalSGDConfig,
        outer: OuterOptimizerConfig,
        gta: GTAConfig,
        streaming: StreamingConfig,
        across: dist.ProcessGroup | None,
        inside: dist.ProcessGroup | None,
    ) -> None:
        """Take what makes up a run: what `LocalSGD` takes."""
        self._synced = tuple(synced)
        self._shapes = {entry.name: list(entry.tensor.shape) for entry in synced}
        self._units = list(units)
        self._config, self._streaming = config, streaming
        self._method = method_of(config, outer, gta, streaming)
        self._tuning = tuning_of(config, outer)
        self._across, self._inside = across, inside
        self._workers = dist.get_world_size(across)
        self._shards = 1 if inside is None else dist.get_world_size(inside)
        self._place = [dist.get_rank(across), 0 if inside is None else dist.get_rank(inside)]
        # After a round, too: norms, residuals, anchors, or steps.
        self._has_own_state = (
            config.skip_anomaly
            or config.codec is not None
            or config.use_async
            or streaming.active
            or gta.in_pairs
        )

    def description(self, replaced: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        """Return this run's record for a state.

        Args:
            replaced: by name, digests of values to which the state belongs, and not to those that have replaced them.
        """
        return {
            "method": self._method,
            "tuning": self._tuning,
            "parameters": self._shapes,
            "units": self._units,
            "place": self._place,
            "shards": self._shards,
            "weights": {**self._digests(), **{name: list(digest) for name, digest in replaced.items()}},
        }

    def knows_its_weights(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state says to which weights it belongs; those of earlier releases do not."""
        return "weights" in state

    def _digests(self) -> dict[str, list[int]]:
        """Return by name a digest of every parameter's present values on this rank."""
        return {entry.name: list(tensor_digest([entry.tensor])) for entry in self._synced}

    def changed(self, state: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return by flag the saved and the present value of the options that a run may change."""
        # Earlier releases did not say.
        return changes(state.get("tuning", self._tuning), self._tuning)

    def is_of_as_many(self, state: Mapping[str, Any]) -> bool:
        """Return whether the run that saved had as many workers."""
        return len(state["schedule"]["synced"]) == self._workers

    def refuse_unfit(self, state: dict[str, Any]) -> None:
        """Refuse a state that a rank cannot continue from; all ranks must call it, with the module's weights of that
        save.

        Raises:
            UserError: it is none, or of another model, method, place or other weights, or the ranks' states are of
                different saves; on all ranks.
        """
        own = []
        try:
            self._refuse(state)
        except UserError as error:
            own.append(str(error))
        save = state.get("scalars", {}).get("rounds"), None if self._config.use_async else state.get("step")
        everyone = gather_at("the loading of a state", (save, own), self._across, self._inside)
        self._require_one_save([[saved for saved, _ in of_worker] for of_worker in everyone])
        refuse_together([[problems for _, problems in of_worker] for of_worker in everyone], own)

    def _refuse(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that does not fit this rank."""
        lacking = _NEEDED - set(state)
        if lacking:
            raise UserError(f"{_WHERE}: it has no {min(lacking)!r}, so it is none; give what state_dict() returned")
        shards = state.get("shards", self._shards)  # earlier releases did not say
        if shards != self._shards:
            raise UserError(
                f"{_WHERE}: saved where the model was cut over {shards} ranks, and shard_group has {self._shards}; "
                f"continue with {shards}, save with full_state_dict=True, which any number loads, or start without it"
            )
        refuse_other_model(state["parameters"], self._shapes, _WHERE)
        # What follows is in their order, which was the optimizer's in earlier releases.
        if list(state["parameters"]) != list(self._shapes):
            raise UserError(f"{_WHERE}: its parameters are in another order than the model's; start without it")
        if self._config.skip_anomaly and state.get("units", self._units) != self._units:
            raise UserError(
                f"{_WHERE}: what it knows of the norms of layers is in the order of a run "
                f"{'without' if self._config.sync_in_forward else 'with'} sync_in_forward; continue like that, or "
                "start without it"
            )
        refuse_other_method(state["method"], self._method, _WHERE, "continue with what it was, or start without it")
        self._refuse_other_interval(state)
        self._refuse_other_place(state)
        self._refuse_other_weights(state)

    def _require_one_save(self, everyone: Sequence[Sequence[tuple[int | None, int | None]]]) -> None:
        """Refuse files of different saves: one that was cut off has replaced those of some ranks only.

        Args:
            everyone: the rounds and steps of the states of all ranks, by worker and rank of the worker.
        """
        if all(saved == everyone[0][0] for of_worker in everyone for saved in of_worker):
            return
        each = [
            f"worker {worker}{f', rank {rank}' if len(of_worker) > 1 else ''}: round {rounds}, step {step}"
            for worker, of_worker in enumerate(everyone)
            for rank, (rounds, step) in enumerate(of_worker)
        ]
        raise UserError(
            f"{_WHERE}: the workers' files are of different saves ({', '.join(each)}); load those of one save"
        )

    def _refuse_other_weights(self, state: Mapping[str, Any]) -> None:
        """Refuse a state with other weights than it was saved with: they would continue from another anchor."""
        if not self.knows_its_weights(state):
            return
        now = self._digests()
        others = [name for name, digest in state["weights"].items() if list(digest) != now[name]]
        if others:
            more = f" (and in {len(others) - 1} more parameters)" if len(others) > 1 else ""
            raise UserError(
                f"{_WHERE}: it belongs to other weights than the module has, which differ in {others[0]}{more}; load "
                "the module's weights of the same save first, then this state"
            )

    def _refuse_other_interval(self, state: Mapping[str, Any]) -> None:
        """Refuse to meet a round in flight in the middle of another schedule."""
        in_flight = any(fragment["on_its_way"] for fragment in state["scalars"]["fragments"])
        # An eager round has no end that could be missed.
        if self._streaming.eager or not in_flight:
            return
        for flag, (before, now) in self.changed(state).items():
            if flag == "--local-sgd-sync-interval":
                raise UserError(
                    f"{_WHERE}: saved while rounds of fragments were in flight, so that {flag} has to be {before}, "
                    f"not {now}; load a state without any"
                )

    def _refuse_other_place(self, state: Mapping[str, Any]) -> None:
        """Refuse what another rank saved, and states of each worker's own where there are more or fewer workers."""
        worker, shard = state.get("place", self._place)
        if shard != self._place[1] or (worker != self._place[0] and self.is_of_as_many(state)):
            raise UserError(
                f"{_WHERE}: it is that of worker {worker}, rank {shard} of its ranks, and this is worker "
                f"{self._place[0]}, rank {self._place[1]}; give every rank what it saved itself"
            )
        if not self.is_of_as_many(state) and (self._has_own_state or not state["scalars"]["equal"]):
            saved = len(state["schedule"]["synced"])
            raise UserError(
                f"{_WHERE}: saved by {saved} workers, each with something of its own, and process_group has "
                f"{self._workers}; continue with {saved}, "
                f"{'' if self._has_own_state else 'save after a round and load that, '}or start without it"
            )
