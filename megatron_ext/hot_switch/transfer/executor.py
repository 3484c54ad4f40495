# SPDX-License-Identifier: Apache-2.0
"""The executor: carries the plan of a switch out over torch.distributed.

One code path for gloo and NCCL: rounds of `batch_isend_irecv`, of which two are in flight at a time. Large parts go
straight from the sender's tensors to the receiver's; small ones, and those with gaps, through staging memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.errors import UserError, combine
from megatron_ext.hot_switch.planning.plan import SwitchPlan
from megatron_ext.hot_switch.transfer.arriving import Arriving
from megatron_ext.hot_switch.transfer.bound import BoundSwitch, bind
from megatron_ext.hot_switch.transfer.flat_tensors import FlatTensors
from megatron_ext.hot_switch.transfer.itinerary import ROUNDS_IN_FLIGHT, Itinerary, LocalTensor, make_itinerary
from megatron_ext.hot_switch.transfer.messages import DEFAULT_SIZES, MessageSizes

__all__ = ["SwitchExecutor", "default_sizes"]

Tensors = Mapping[str, torch.Tensor]


class SwitchExecutor:
    """Carries out one plan on this rank, again and again.

    The memory of the results and of messages is kept between switches; `release` gives it up, and `settle` that of
    messages alone.

    Attributes:
        itinerary: what this rank does; made once.
    """

    def __init__(
        self, plan: SwitchPlan, group: Any, *, sizes: MessageSizes | None = None, gradients: bool = False
    ) -> None:
        """Work out what this rank does. Exchanges nothing.

        Args:
            plan: the same on all ranks.
            group: process group; its rank i is the plan's rank i.
            sizes: of messages, the same on all ranks; None for `DEFAULT_SIZES` of the group's backend.
            gradients: move the parameters' gradients, in fp32 and without buffers, and add them to what is there.

        Raises:
            UserError: the group has another size than the plan, or a backend without default sizes.
        """
        if dist.get_world_size(group) != plan.world_size:
            raise UserError(
                f"the plan of a switch is for {plan.world_size} ranks, but the process group has "
                f"{dist.get_world_size(group)}"
            )
        self._group = group
        self._sizes = sizes or default_sizes(group)
        self._gradients = gradients
        self.itinerary: Itinerary = make_itinerary(plan, dist.get_rank(group), self._sizes, gradients=gradients)
        self._flat: FlatTensors | None = None
        self._staging: list[torch.Tensor] = []
        self._bound: BoundSwitch | None = None
        # By unit, over all ranks; known once they have met.
        self._rounds_until: dict[str, int] | None = None

    def switch(self, tensors: Tensors, out: Tensors | None = None) -> dict[str, torch.Tensor]:
        """Return this rank's tensors after the switch. All ranks of the group must call it.

        Args:
            tensors: what the rank holds before, contiguous, by local name; unchanged. Others than the itinerary's
                `sources` are not looked at.
            out: where the results go, contiguous, by name. None for memory of the executor: one allocation, except
                that a result which is a run of one of `tensors` shares its memory. The next switch overwrites it.
                With `gradients` they must be given, and the results are added.

        Returns:
            The itinerary's `targets` by name: tensors of `out`, or of the executor.

        Raises:
            UserError: tensors are missing or do not fit, naming each, or the ranks' message sizes differ. Nothing
                has been sent then. An error of one rank leaves its peers waiting until their group's timeout.
            RuntimeError: a peer is gone or too slow; the executor must not be used again.
        """
        results, arriving = self.begin(tensors, out)
        arriving.finish()
        return results

    def begin(self, tensors: Tensors, out: Tensors | None = None) -> tuple[dict[str, torch.Tensor], Arriving]:
        """Begin a switch, whose results may be used unit by unit, each once it has arrived.

        `tensors` must stay as they are, and the executor must not be used, until everything has arrived. For the
        arguments and errors see `switch`.

        Returns:
            The results of `switch`, and what tells when they are there.
        """
        _check(tensors, self.itinerary.sources, "tensors to switch")
        if out is not None:
            _check(out, self.itinerary.targets, "tensors to switch into")
        elif self._gradients:
            raise UserError("gradients are added to what is there: give `out`, the tensors to add them to")
        with torch.no_grad():
            bound = self._bind(tensors, out)
            assert self._rounds_until is not None
            arriving = Arriving(bound, self._rounds_until, self._put)
        return dict(bound.results), arriving

    def settle(self) -> None:
        """Give up the memory of messages until the next switch; results stay."""
        for staging in self._staging:
            staging.untyped_storage().resize_(0)

    def release(self) -> None:
        """Give up all memory, and every reference to tensors given.

        Results must not be used any more, until the next switch without `out` takes the same memory again.
        """
        self._bound = None
        self._staging = []
        if self._flat is not None:
            self._flat.give_up()

    def _bind(self, tensors: Tensors, out: Tensors | None) -> BoundSwitch:
        """Return the views that this switch works on: those of the last one, if the tensors lie where they did."""
        for staging in self._staging:
            if staging.untyped_storage().nbytes() == 0:
                staging.untyped_storage().resize_(self.itinerary.staging_bytes)
        if self._bound is not None and self._bound.fits(tensors, out):
            return self._bound
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        self._meet(device)
        if not self._staging:
            self._staging = [
                torch.empty(self.itinerary.staging_bytes, dtype=torch.uint8, device=device)
                for _ in range(ROUNDS_IN_FLIGHT)
            ]
        self._bound = bind(
            self.itinerary,
            tensors,
            self._own_targets(device) if out is None else {name: out[name] for name in self.itinerary.targets},
            self._staging,
            self._group,
            has_own_targets=out is None,
            adds=self._gradients,
        )
        return self._bound

    def _own_targets(self, device: torch.device) -> Tensors:
        if self._flat is None:
            aliases = self.itinerary.aliases
            needed = {name: local for name, local in self.itinerary.targets.items() if name not in aliases}
            self._flat = FlatTensors(needed, device)
        self._flat.take()
        return self._flat.views

    def _meet(self, device: torch.device) -> None:
        """Compare the ranks' settings once. NCCL also wants the first operation of a group to have all ranks."""
        if self._rounds_until is not None:
            return
        sizes = [self._sizes.direct_bytes, self._sizes.chunk_bytes, self._sizes.round_bytes]
        mine = torch.tensor([*sizes, self._gradients], device=device)
        all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(all_of_them, mine, group=self._group)
        for rank, theirs in enumerate(all_of_them):
            if not torch.equal(theirs, mine):
                raise UserError(
                    f"rank {rank} switches with direct_bytes, chunk_bytes, round_bytes, gradients = "
                    f"{theirs.tolist()}, and rank {dist.get_rank(self._group)} with {mine.tolist()}; give all ranks "
                    "the same"
                )
        latest = torch.tensor([*self.itinerary.rounds_until.values(), 0], device=device)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=self._group)
        self._rounds_until = dict(zip(self.itinerary.rounds_until, latest.tolist(), strict=False))

    def _put(self, into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        if into:
            (torch._foreach_add_ if self._gradients else torch._foreach_copy_)(into, values)


def default_sizes(group: Any) -> MessageSizes:
    """Return the sizes of messages for the backend of a process group.

    Raises:
        UserError: there are none.
    """
    backend = str(dist.get_backend(group))
    if backend == "fake":  # one rank of a job by itself, for `megatron_ext.explain`
        backend = "nccl"
    if backend not in DEFAULT_SIZES:
        raise UserError(
            f"there are no default message sizes for the backend '{backend}' (there are for "
            f"{', '.join(DEFAULT_SIZES)}); give `sizes`"
        )
    return DEFAULT_SIZES[backend]


def _check(given: Tensors, expected: Mapping[str, LocalTensor], what: str) -> None:
    """Raise one error about all tensors that are missing or not as expected."""
    problems = []
    for name, local in expected.items():
        tensor = given.get(name)
        if tensor is None:
            problems.append(f"{name} is missing")
        elif tensor.shape != local.shape:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, expected {local.shape}")
        elif tensor.dtype != local.dtype:
            problems.append(f"{name} has type {tensor.dtype}, expected {local.dtype}")
        elif not tensor.is_contiguous():
            problems.append(f"{name} is not contiguous; give its contiguous copy")
    if problems:
        raise combine(problems, what)
