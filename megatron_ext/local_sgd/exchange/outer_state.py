# SPDX-License-Identifier: Apache-2.0
"""What a fragment has between its rounds: anchor, outer optimizer, and what codecs and eager rounds keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ext.local_sgd.exchange.compressed import CompressedRound
from megatron_ext.local_sgd.exchange.eager import EagerRound
from megatron_ext.local_sgd.exchange.host_memory import HostMemory
from megatron_ext.local_sgd.exchange.owned import OwnedRuns
from megatron_ext.local_sgd.exchange.owner_shard import OuterShard, TensorPart
from megatron_ext.local_sgd.exchange.segments import ElementRun
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.outer_optimizer import averages_values, build_outer_optimizer, outer_states_per_anchor
from megatron_ext.outer.penalty import Penalty
from megatron_ext.outer.reducer_config import GTAConfig

__all__ = ["OuterState", "SyncedTensor"]


@dataclass(frozen=True, kw_only=True)
class SyncedTensor:
    """One tensor that the workers agree on in every round."""

    tensor: torch.Tensor
    """fp32, any shape, updated in place."""

    name: str
    """Its global name, for messages."""

    unit: str
    """The unit it belongs to: one of the engine's units."""

    counted: bool = True
    """Whether it counts in norms over the worker (False for a replica of what another rank counts)."""

    on_two_stages: bool = False
    """Whether two pipeline stages of the worker hold it (a tied embedding). Their ranks may be given it in other parts,
    so that no element of it may be treated by its neighbours."""


class OuterState:
    """The state of a fragment on one rank, and its form in a checkpoint."""

    def __init__(
        self,
        synced: Sequence[SyncedTensor],
        owned: OwnedRuns,
        penalty: Penalty,
        *,
        outer: OuterOptimizerConfig,
        gta: GTAConfig,
        compressed: CompressedRound | None,
        eager: EagerRound | None,
        device: torch.device,
        offload: bool = False,
    ) -> None:
        """Prepare; there is no anchor before `begin` or `load`.

        Args:
            synced: this rank's tensors of the fragment.
            owned: what of them this rank owns among the workers.
            penalty: whose detector is state, too.
            outer: the outer optimizer.
            gta: how pseudo-gradients become one.
            compressed: the fragment's compressed rounds, if it has any.
            eager: its eager rounds, if it has any.
            device: of the values.
            offload: keep anchor and outer optimizer in the host's memory.
        """
        self._synced = tuple(synced)
        self._values = [entry.tensor for entry in synced]
        self._owned = owned
        self._penalty = penalty
        self._outer = outer
        self._gta = gta
        # Eager steps are by parts of two rounds' pseudo-gradients.
        has_values = compressed is None and eager is None
        self._averages = has_values and averages_values(outer, gta)
        self._compressed = compressed
        self._eager = eager
        self._device = device
        self._host = HostMemory(device) if offload else None
        self._shard: OuterShard | None = None

    @property
    def shard(self) -> OuterShard:
        """Anchor, outer state and outer step of what this rank owns."""
        assert self._shard is not None, "there is no anchor in warm-up"
        return self._shard

    @property
    def is_offloaded(self) -> bool:
        """Whether anchor and outer optimizer are kept on the host."""
        return self._host is not None

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of host memory that anchor and outer optimizer take from `begin` on."""
        if self._host is None:
            return 0
        # torch rounds pinned memory up to powers of two.
        return sum(self.kept_bytes(pinned=self._device.type == "cuda"))

    def kept_bytes(self, *, pinned: bool = False) -> tuple[int, int]:
        """Return the bytes that anchor and outer optimizer take from `begin` on.

        Args:
            pinned: every piece is rounded up to a power of two, as torch does it with pinned memory of the host.
        """
        sizes = [4 * run.numel for _, run in self._owned.numbered]
        if pinned:
            sizes = [1 << (size - 1).bit_length() for size in sizes]
        return sum(sizes), outer_states_per_anchor(self._outer) * sum(sizes)

    @property
    def own_bytes(self) -> int:
        """Bytes that this worker keeps besides anchor and outer optimizer: a codec's replicas and residuals, and what
        others still have to give in eager rounds.
        """
        values = 4 * sum(value.numel() for value in self._values)
        return values * (2 * (self._compressed is not None) + (self._eager is not None))

    def begin(self) -> None:
        """Take the present values, which must be equal on all workers, as the anchor."""
        self._start(self._kept(self._values))
        if self._compressed is not None:
            self._compressed.begin(self._values)

    def move_to_values(self) -> None:
        """Continue from the present values, which must be equal on all workers; the outer optimizer stays.

        Residuals stay, too: an anchor moves by as much as the replica that all workers have of it.
        """
        now = self._owned.runs(self._values)
        if self._compressed is None:
            for anchor, part in zip(self.shard.anchors, now, strict=True):
                anchor.copy_(part)
            return
        before = self._owned.runs(self._compressed.replicas)
        for anchor, part, replica in zip(self.shard.anchors, now, before, strict=True):
            anchor.add_((part - replica).to(anchor.device))
        self._compressed.begin(self._values, self._compressed.residuals)

    def take_late(self) -> list[torch.Tensor]:
        """Return what the others still have to give in eager rounds, like the values, and forget it; else nothing."""
        if self._eager is None:
            return []
        late = self._owned.gather(self._eager.late(), self._values)
        self._eager.load()
        return late

    def tensor_state(self) -> dict[str, list[torch.Tensor]]:
        """Gather anchor and outer optimizer tensors from their owners; all ranks of `across` must call it.

        Returns:
            Lists by name, in the order and shapes of the values. Nothing where no worker knows another's.
        """
        return {} if self._owned.apart else self._outer_state()

    def worker_state(self) -> dict[str, list[torch.Tensor]]:
        """Return this worker's own state besides its values, in their order and shapes, by name; all must call it."""
        if self._eager is not None:
            return {**self._outer_state(), "late": self._owned.gather(self._eager.late(), self._values)}
        if self._owned.apart:
            return self._outer_state()
        return {} if self._compressed is None else {"residual": self._compressed.residuals}

    def _outer_state(self) -> dict[str, list[torch.Tensor]]:
        shard = self.shard
        parts = {"anchor": shard.anchors, **shard.optimizer.tensor_state()}
        at = None if self._host is None else torch.device("cpu")
        state = {name: self._owned.gather(owned, self._values, at) for name, owned in parts.items()}
        if self._compressed is not None:
            state["replica"] = self._compressed.replicas
        return state

    def gather_anchor(self) -> list[torch.Tensor]:
        """Return the values that all workers agreed on last, like the values; all ranks of `across` must call it."""
        if self._compressed is not None:
            return [replica.clone() for replica in self._compressed.replicas]
        return self._owned.gather(self.shard.anchors, self._values)

    def scalar_state(self) -> dict[str, Any]:
        """Return the states that are equal on all ranks."""
        return {"outer": self.shard.optimizer.scalar_state(), "penalty": self._penalty.state()}

    def load(
        self, tensors: dict[str, list[torch.Tensor]], scalars: dict[str, Any], own: dict[str, list[torch.Tensor]]
    ) -> None:
        """Take over a saved state.

        Args:
            tensors: as `tensor_state` returned them, perhaps with another number of workers.
            scalars: as `scalar_state` returned them.
            own: as `worker_state` returned it.
        """
        # First, because it may refuse.
        self._penalty.load(scalars["penalty"])
        outer = dict(own if self._owned.apart else tensors)
        replicas = outer.pop("replica", None)
        if self._compressed is not None:
            assert replicas is not None
            self._compressed.begin([replica.to(self._device) for replica in replicas], own.get("residual"))
        parts = {name: self._kept(values) for name, values in outer.items()}
        if self._eager is not None:
            self._eager.load(parts.pop("late"))
        self._start(parts.pop("anchor")).optimizer.load(parts, scalars["outer"])

    def _kept(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of what this rank owns of tensors like the values, where its state is kept."""
        runs = self._owned.runs(tensors)
        if self._host is not None:
            return [self._host.keep(run) for run in runs]
        # A state that was read from a file may be on the host.
        return [run.to(self._device, copy=True) for run in runs]

    def _start(self, anchors: list[torch.Tensor]) -> OuterShard:
        """Begin at these parts of the anchor."""
        reducer = self._gta.build()
        self._shard = OuterShard(
            anchors,
            [list(self._parts(run)) for _, run in self._owned.numbered],
            optimizer=build_outer_optimizer(self._outer, anchors),
            reducer=reducer,
            sparsifier=reducer.sparsifier,
            # The terms are this worker's own, and of a pair its partner's.
            worker=0 if self._owned.apart else self._owned.worker,
            device=self._device,
            terms_are_gradients=self._compressed is not None,
            averages=self._averages,
            host=self._host,
        )
        return self._shard

    def _parts(self, run: ElementRun) -> Iterator[TensorPart]:
        """Yield what a run is made of."""
        start = 0
        for piece in run.pieces:
            entry, stop = self._synced[piece.index], start + piece.numel
            yield TensorPart(
                start=start,
                stop=stop,
                tensor=entry.name,
                first=piece.start,
                is_counted=entry.counted,
                is_dense=entry.on_two_stages,
            )
            start = stop
