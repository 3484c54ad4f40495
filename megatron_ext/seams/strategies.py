# SPDX-License-Identifier: Apache-2.0
"""Seam: several parallel layouts in one process.

Megatron 0.19 takes process groups from two places. Models, layers, DDP and the checkpoint code hold the
`ProcessGroupCollection` they were built with. The schedules, random seeds, and users' own `get_batch` ask the
module globals of `parallel_state` at call time. So each layout gets a full set of those globals, made by Megatron's
own `initialize_model_parallel`, and the set of the layout whose turn it is is put in place. Between turns, and for
everything else in Megatron, home's set is there.

In a job with workers home spans all of them and is cut by `seams.process_groups`. Guests are made inside each worker,
as if its ranks, numbered from 0, were a job.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.hooks import AddsLayouts, hooks
from megatron_ext.params import DEFAULT_ORDER, Layout
from megatron_ext.patching import Patch
from megatron_ext.run_options import run_options
from megatron_ext.seams.process_groups import let_layout_span_workers, spans_workers

__all__ = ["ParallelState", "keeping_random_state", "parallel_states", "patches", "seed_device"]

_BUFFER = "_GLOBAL_MEMORY_BUFFER"


class ParallelState:
    """The module globals of `parallel_state` for one layout."""

    def __init__(self, *, spans_workers: bool) -> None:
        """Take what is in place now.

        Args:
            spans_workers: whether this is the layout that is cut into workers, or one inside a worker.
        """
        from megatron.core import parallel_state

        self._values = {name: getattr(parallel_state, name) for name in _names()}
        self._spans_workers = spans_workers

    def install(self) -> None:
        """Put this layout in place."""
        from megatron.core import parallel_state

        for name, value in self._values.items():
            setattr(parallel_state, name, value)
        let_layout_span_workers(self._spans_workers)

    def share_buffers(self, other: ParallelState) -> None:
        """Take the memory that Megatron keeps for gathered activations from another layout, instead of as much again.

        Turns follow one another, and nothing stays in it from one to the next.
        """
        self._values[_BUFFER] = other._values[_BUFFER]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put this layout in place, and afterwards again what was there before."""
        before = ParallelState(spans_workers=spans_workers())
        self.install()
        try:
            yield
        finally:
            before.install()


_states: tuple[ParallelState, ...] = ()
_making: _Making | None = None


def parallel_states() -> tuple[ParallelState, ...]:
    """Return the layouts of this run: home's, then the guests'.

    Raises:
        RuntimeError: model-parallel groups have not been built yet.
    """
    if not _states:
        raise RuntimeError("parallel layouts are made by initialize_model_parallel, which has not run yet")
    return _states


def patches() -> list[Patch]:
    """Return the patches of this seam."""
    return [
        Patch(
            name="strategies/groups",
            target="megatron.core.parallel_state:initialize_model_parallel",
            wrap=_wrap_initialize,
            serves=(AddsLayouts.guest_layouts,),
            parameters=(
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "virtual_pipeline_model_parallel_size",
                "context_parallel_size",
                "expert_model_parallel_size",
                "expert_tensor_parallel_size",
                "order",
                "local_world_size",
            ),
            reason="build the process groups of every strategy, not only of home",
        ),
        Patch(
            name="strategies/shared-groups",
            target="megatron.core.parallel_state:create_group",
            wrap=_wrap_create_group,
            parameters=("ranks", "timeout", "backend", "pg_options", "use_local_synchronization", "group_desc"),
            rebind=False,
            reason="strategies whose groups have the same ranks and purpose share one communicator",
        ),
        Patch(
            name="strategies/destroy",
            target="megatron.core.parallel_state:destroy_model_parallel",
            wrap=_wrap_destroy,
            reason="forget the guests' groups together with home's",
        ),
    ]


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Put the states of all generators back afterwards."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states = torch.get_rng_state(), torch.cuda.get_rng_state(), tracker.get_states()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        torch.cuda.set_rng_state(states[1])
        tracker.set_states(states[2])


def seed_device(seed: int) -> None:
    """Seed the device's generators for the layout in place, as Megatron does at the start of a run."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())


def _names() -> list[str]:
    """Return the globals that describe a layout: all of the module's private names in capitals."""
    from megatron.core import parallel_state

    return [name for name in vars(parallel_state) if name.startswith("_") and name[1:].isupper()]


def _wrap_initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        global _states, _making
        given = signature.bind(*args, **kwargs).arguments
        megatron_args = run_options()
        nothing = ParallelState(spans_workers=True)
        _making = _Making(_workers(given, hooks.worker_count(megatron_args)))
        try:
            result = original(**given)
            made = [ParallelState(spans_workers=True)]
            for layout in hooks.guest_layouts(megatron_args):
                nothing.install()
                with _making.inside_worker():
                    original(**{**given, **_sizes(layout), "local_world_size": layout.world_size})
                made.append(ParallelState(spans_workers=False))
                made[-1].share_buffers(made[0])
        finally:
            _making = None
        made[0].install()
        _states = tuple(made)
        return result

    return initialize_model_parallel


def _workers(given: dict[str, Any], workers: int) -> list[list[int]]:
    """Return the ranks of each worker, ascending: contiguous slices of home's data-parallel dimension."""
    tp, pp = given.get("tensor_model_parallel_size", 1), given.get("pipeline_model_parallel_size", 1)
    cp, ranks = given.get("context_parallel_size", 1), dist.get_world_size()
    home = Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=given.get("expert_model_parallel_size", 1),
        etp=given.get("expert_tensor_parallel_size"),
        dp=ranks // (tp * pp * cp),
        order=given.get("order", DEFAULT_ORDER),
    )
    places = [home.coordinates(rank).dp * workers // home.dp for rank in range(ranks)]
    return [[rank for rank in range(ranks) if places[rank] == worker] for worker in range(workers)]


class _Making:
    """What the layouts of a run have in common while they are made."""

    def __init__(self, workers: list[list[int]]) -> None:
        """Start with home.

        Args:
            workers: the ranks of each.
        """
        self._workers = workers
        self._mine = next(ranks for ranks in workers if dist.get_rank() in ranks)
        self._is_inside = False
        # Groups by (ranks, backend, what they are for).
        self._groups: dict[tuple[Any, ...], Any] = {}

    @contextmanager
    def inside_worker(self) -> Iterator[None]:
        """Number this worker's ranks from 0, as if they were the job; what is made has their real numbers after it."""
        from megatron.core import parallel_state

        renumbered = _Instead(dist, get_rank=lambda: self._mine.index(dist.get_rank()))
        parallel_state.torch, real = _Instead(torch, distributed=renumbered), parallel_state.torch
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False
            parallel_state.torch = real
        for name in _names():
            if name.endswith("_RANKS"):
                setattr(parallel_state, name, self._real(getattr(parallel_state, name), self._mine))

    def group(self, original: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Find or make a group. Every rank asks for all groups in the same order, so all of them do the same."""
        if not self._is_inside:
            return self._find(original, given)
        # Every worker makes its own, and takes part in making the others'.
        found = [
            self._find(original, {**given, "ranks": self._real(given["ranks"], worker)}) for worker in self._workers
        ]
        return found[self._workers.index(self._mine)]

    def _find(self, original: Callable[..., Any], given: dict[str, Any]) -> Any:
        from megatron.core import parallel_state

        key = (tuple(given["ranks"]), given.get("backend"), given.get("group_desc"))
        if key not in self._groups:
            numbering = parallel_state.torch
            parallel_state.torch = torch
            try:
                self._groups[key] = original(**given)
            finally:
                parallel_state.torch = numbering
        return self._groups[key]

    def _real(self, ranks: Any, worker: list[int]) -> Any:
        """Return the real numbers of a worker's ranks, in lists of any depth."""
        if isinstance(ranks, list):
            return [self._real(rank, worker) for rank in ranks]
        return None if ranks is None else worker[ranks]


class _Instead:
    """A module with a few attributes changed."""

    def __init__(self, module: Any, **changed: Any) -> None:
        self._module = module
        vars(self).update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _sizes(layout: Layout) -> dict[str, int | None]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def _wrap_create_group(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def create_group(*args: Any, **kwargs: Any) -> Any:
        if _making is None:
            return original(*args, **kwargs)
        return _making.group(original, dict(signature.bind(*args, **kwargs).arguments))

    return create_group


def _wrap_destroy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def destroy_model_parallel(*args: Any, **kwargs: Any) -> Any:
        global _states
        _states = ()
        return original(*args, **kwargs)

    return destroy_model_parallel
