# SPDX-License-Identifier: Apache-2.0
"""A guest: the model under another strategy than home's, with memory only while it trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_ext.hot_switch.data.rows import PackedBatch
from megatron_ext.hot_switch.planning.plan import SwitchPlan, plan_switch
from megatron_ext.hot_switch.runtime.placed_model import PlacedModel
from megatron_ext.hot_switch.strategies.strategy import Strategy
from megatron_ext.hot_switch.transfer.arriving import Arriving
from megatron_ext.hot_switch.transfer.executor import SwitchExecutor
from megatron_ext.hot_switch.transfer.flat_tensors import FlatTensors
from megatron_ext.hot_switch.transfer.messages import MessageSizes
from megatron_ext.params import ParameterView
from megatron_ext.seams.forward import wait_before_use
from megatron_ext.seams.strategies import ParallelState

__all__ = ["Guest", "SwitchOptions", "held_tensors"]

Tensors = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwitchOptions:
    """How switches are planned, and among which ranks; and what else guests share."""

    group: Any
    """The process group of the ranks that switch: the worker's."""

    gpus_per_node: int
    """Ranks of a node."""

    algorithm: str
    """Key of `ALGORITHMS`."""

    attention: str
    """Over what guests compute it, see `DocumentMasks`."""

    sizes: MessageSizes
    """Of the switches' messages."""

    frozen: frozenset[str] = frozenset()
    """Names of the tensors that are not trained: their parameters move, but they have no gradients."""

    def executor(self, plan: SwitchPlan, *, gradients: bool = False) -> SwitchExecutor:
        """Return the executor of a plan."""
        return SwitchExecutor(plan, self.group, sizes=self.sizes, gradients=gradients)

    def plan(self, source: ParameterView, target: ParameterView, *, gradients: bool = False) -> SwitchPlan:
        """Return the plan by which parameters, or gradients, go from one view's layout to the other's."""
        return plan_switch(
            source.shape,
            source.layout,
            target.layout,
            gpus_per_node=min(self.gpus_per_node, source.layout.world_size),
            algorithm=self.algorithm,
            without=self.frozen if gradients else (),
        )


def held_tensors(view: ParameterView) -> dict[str, torch.Tensor]:
    """Return this rank's parameters and persistent buffers by global name, sharing their memory."""
    return {entry.placed.name: entry.parameter.data for entry in (*view.entries, *view.buffers)}


class Guest(PlacedModel):
    """A model that borrows its parameters and gives its gradients away.

    Outside its turn it has no memory for either. It never writes to its parameters, so where the plan allows they are
    home's own memory.

    Parameters come from home or from the guest before, and gradients go home or to the guest after, whichever moves
    fewer bytes; of equals it is home. A guest without data in a step is left out of the chain.

    Attributes:
        before: the guest that runs before this one.
        from_home: plan of parameters' way here from home.
        to_home: plan of gradients' way home.
        from_before: plan of parameters' way here from the guest before, None for the first.
        gradients_from_before: the same of gradients.
        seconds_of_arrival: for which the last turn's first forward pass waited for parameters.
    """

    def __init__(
        self,
        strategy: Strategy,
        state: ParallelState,
        chunks: Sequence[Any],
        *,
        home: ParameterView,
        before: Guest | None,
        options: SwitchOptions,
    ) -> None:
        """Plan this guest's switches, and give up the memory that its chunks were built with.

        Args:
            strategy: the guest's.
            state: its parallel layout, which must be in place.
            chunks: its model chunks, wrapped in DDP.
            home: home's tensors.
            before: the guest that runs before this one.
            options: of the plans.
        """
        from megatron.core import parallel_state

        super().__init__(strategy, state, chunks, attention=options.attention)
        # Its routers count, and have biases, but these are home's to change.
        self.config.moe_router_enable_expert_bias = False
        self.before = before
        self.from_home, self.to_home = options.plan(home, self.view), options.plan(self.view, home, gradients=True)
        self.from_before = None if before is None else options.plan(before.view, self.view)
        self.gradients_from_before = self.from_before
        if before is not None and options.frozen:
            self.gradients_from_before = options.plan(before.view, self.view, gradients=True)
        self._from_home = options.executor(self.from_home)
        self._to_home = options.executor(self.to_home, gradients=True)
        self._from_before: SwitchExecutor | None = None
        # Memory for parameters that come from there.
        self._own: FlatTensors | None = None
        self._gradients_from_before: SwitchExecutor | None = None
        if before is not None and self.from_before is not None and self.gradients_from_before is not None:
            if self.from_before.bytes_moved < self.from_home.bytes_moved:
                self._from_before = options.executor(self.from_before)
            if self.gradients_from_before.bytes_moved < before.to_home.bytes_moved:
                self._gradients_from_before = options.executor(self.gradients_from_before, gradients=True)
        self._entries = (*self.view.entries, *self.view.buffers)
        self._unit_of = {id(entry.parameter): entry.unit for entry in self.view.entries}
        self._arriving: Arriving | None = None
        self.seconds_of_arrival = 0.0
        # Later stages wait for activations before they use parameters, and would keep back what first stages wait for.
        self._begins_early = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        wait_before_use(self.chunks, self._require)
        self.chunks[0].register_forward_hook(self._finish_arriving)
        self._tokens = torch.zeros((), dtype=torch.int)
        self.config.finalize_model_grads_func = self._finalize
        self._nothing = torch.empty(0, device=self.device)
        self._drop_tensors()
        self._drop_gradients()
        self._received = self.gradient_sums() if self.takes_gradients else None
        self._has_received = False

    @property
    def may_follow(self) -> bool:
        """Whether the guest before it is nearer than home: switching from it sends fewer bytes."""
        return self._from_before is not None

    @property
    def takes_gradients(self) -> bool:
        """Whether the guest before it had better send its gradients here than home."""
        return self._gradients_from_before is not None

    def borrow(self, source: Tensors, *, from_home: bool, at_once: bool) -> dict[str, torch.Tensor]:
        """Take parameters from home or from the guest before. All ranks must call it.

        Those from home need not be there yet: they arrive, layer by layer, during the turn's first forward pass.

        Args:
            source: what the rank holds there, by global name.
            from_home: where `source` is from.
            at_once: whether to wait for all of them.

        Returns:
            This guest's parameters and buffers by global name, which hold until `give_back`. They may share home's
            memory, but not that of a guest, which is given back while they are in use.
        """
        if from_home:
            held, self._arriving = self._from_home.begin(source)
            if at_once or not self._begins_early:
                self._finish_arriving()
            self.seconds_of_arrival = 0.0 if self._arriving is None else -self._arriving.seconds
        else:
            assert self._from_before is not None
            if self._own is None:
                self._own = FlatTensors(self._from_before.itinerary.targets, self.device)
            self._own.take()
            held = self._from_before.switch(source, out=self._own.views)
            self._from_before.release()
        for entry in self._entries:
            entry.parameter.data = held[entry.placed.name]
        return held

    def give_back(self) -> None:
        """Give up the memory of parameters."""
        self._drop_tensors()
        self._from_home.release()
        if self._own is not None:
            self._own.give_up()

    @contextmanager
    def training(self, row_length: int, batches: Sequence[PackedBatch], home: Any, seed: int) -> Iterator[None]:
        """Let the guest train: a turn with gradient memory.

        Args:
            row_length: positions of a row.
            batches: this rank's micro-batches.
            home: home's `TransformerConfig`.
            seed: for dropout, see `turn`.
        """
        self.config.grad_scale_func, self.config.timers = home.grad_scale_func, home.timers
        with self.turn(row_length, batches, seed):
            for chunk in self.chunks:
                chunk.restore_grad_buffers(synchronize=False)
                chunk.zero_grad_buffer()
            yield

    def send_gradients(self, home: Tensors) -> None:
        """Add the gradients to home's, by global name, fp32, and give up their memory. All ranks must call it."""
        self._to_home.switch(self.gradients(), out=home)
        self._to_home.release()
        self._drop_gradients()

    def pass_gradients_on(self, after: Guest) -> None:
        """Send the gradients to the guest that runs next, and give up their memory. All ranks must call it."""
        executor = after._gradients_from_before
        assert executor is not None and after._received is not None
        after._received.take_zeros()
        after._has_received = True
        executor.switch(self.gradients(), out=after._received.views)
        executor.release()
        self._drop_gradients()

    @property
    def counted_tokens(self) -> torch.Tensor:
        """Predicted tokens of this replica in the last turn, on the ranks of the last stage; 0 elsewhere."""
        return self._tokens

    def _finalize(
        self, model: list[Any], num_tokens: torch.Tensor | None = None, pg_collection: Any = None, **kwargs: Any
    ) -> None:
        """Reduce the gradients, but leave them undivided: home divides by the tokens of all strategies.

        What the guest before sent is reduced already, and is added afterwards.
        """
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads

        assert num_tokens is not None, "hot switching needs --calculate-per-token-loss"
        self._tokens = num_tokens
        finalize_model_grads(model, None, pg_collection=pg_collection, **kwargs)
        if self._has_received and self._received is not None:
            self._has_received = False
            gradients, sums = self.gradients(), self._received.views
            torch._foreach_add_([gradients[name] for name in sums], list(sums.values()))
            self._received.give_up()

    def _require(self, parameters: Iterable[torch.Tensor]) -> None:
        if self._arriving is not None:
            self._arriving.require({self._unit_of[id(parameter)] for parameter in parameters})

    def _finish_arriving(self, *_: Any) -> None:
        if self._arriving is not None:
            self._arriving.finish()
            self.seconds_of_arrival += self._arriving.seconds
            self._arriving = None
            self._from_home.settle()

    def _drop_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)

    def _drop_tensors(self) -> None:
        for entry in self._entries:
            entry.parameter.data = self._nothing.to(entry.parameter.dtype)
