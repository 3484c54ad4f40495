# SPDX-License-Identifier: Apache-2.0
"""Seam: several parallel layouts in one process.

Megatron 0.19 takes process groups from two places. Models, layers, DDP and the checkpoint code hold the
`ProcessGroupCollection` they were built with. The schedules, random seeds, and users' own `get_batch` ask the
module globals of `parallel_state` at call time. So each layout gets a full set of those globals, made by Megatron's
own `initialize_model_parallel`, and the set of the layout whose turn it is is put in place. Between turns, and for
everything else in Megatron, home's set is there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_ext.hooks import hooks
from megatron_ext.params import Layout
from megatron_ext.patching import Patch

__all__ = ["ParallelState", "keeping_random_state", "parallel_states", "patches", "seed_device", "with_arguments"]


class ParallelState:
    """The module globals of `parallel_state` for one layout."""

    def __init__(self) -> None:
        """Take what is in place now."""
        from megatron.core import parallel_state

        self._values = {name: getattr(parallel_state, name) for name in _names()}

    def install(self) -> None:
        """Put this layout in place."""
        from megatron.core import parallel_state

        for name, value in self._values.items():
            setattr(parallel_state, name, value)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put this layout in place, and afterwards again what was there before."""
        before = ParallelState()
        self.install()
        try:
            yield
        finally:
            before.install()


_states: tuple[ParallelState, ...] = ()
# Groups by (ranks, backend, what they are for), while layouts are being made.
_shared: dict[tuple[Any, ...], Any] | None = None


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
            parameters=(
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "virtual_pipeline_model_parallel_size",
                "context_parallel_size",
                "expert_model_parallel_size",
                "expert_tensor_parallel_size",
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
def with_arguments(**values: Any) -> Iterator[None]:
    """Give Megatron's arguments other values for a while."""
    from megatron.training import get_args

    args = get_args()
    before = {name: getattr(args, name) for name in values}
    vars(args).update(values)
    try:
        yield
    finally:
        vars(args).update(before)


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Put the states of all generators back afterwards."""
    import torch
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
        global _states, _shared
        from megatron.training import get_args

        given = signature.bind(*args, **kwargs).arguments
        nothing = ParallelState()
        _shared = {}
        try:
            result = original(**given)
            made = [ParallelState()]
            for layout in hooks.guest_layouts(get_args()):
                nothing.install()
                original(**{**given, **_sizes(layout)})
                made.append(ParallelState())
        finally:
            _shared = None
        made[0].install()
        _states = tuple(made)
        return result

    return initialize_model_parallel


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
        if _shared is None:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        # Every rank asks for all groups in the same order, so all of them find or make the same ones.
        key = (tuple(given["ranks"]), given.get("backend"), given.get("group_desc"))
        if key not in _shared:
            _shared[key] = original(*args, **kwargs)
        return _shared[key]

    return create_group


def _wrap_destroy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def destroy_model_parallel(*args: Any, **kwargs: Any) -> Any:
        global _states
        _states = ()
        return original(*args, **kwargs)

    return destroy_model_parallel
