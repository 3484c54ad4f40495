# SPDX-License-Identifier: Apache-2.0
"""Random numbers: the CPU's default generator plays the device generator, the host gets one of its own.

On a GPU, Megatron has two generators per process: the device's, which dropout draws from and which the RNG
tracker forks, and the host's, which data loaders draw from. On the CPU dropout draws from the default
generator, so that one takes the device's part. Data loaders exist on tensor-parallel rank 0 alone and are
rebuilt after a resume: were they to draw from the same generator, dropout masks of replicated activations
would differ between the tensor-parallel ranks, and a resumed run would leave the trajectory. They draw from a
host stream instead.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.backends.cpu.device_placement import TORCH_VERSIONS
from megatron_ext.patching import Patch

__all__ = ["HostStream", "patches", "silence_fork_warning", "unsilence_fork_warning"]

_TRACKER_LOGGER = "megatron.core.tensor_parallel.random"
_FORK_WARNING = "CPU RNG state changed within GPU RNG context"


class HostStream:
    """The stream that host-side code (data loaders) draws from, apart from the device's.

    Used as a context manager: inside, the default generator continues the host stream; outside, it is exactly
    where it was. The stream starts from the process's seed. Checkpoints do not hold it: Megatron's own datasets
    draw nothing from it.
    """

    def __init__(self) -> None:
        self._state: torch.Tensor | None = None
        self._device_state: torch.Tensor | None = None
        self._depth = 0

    def __enter__(self) -> None:
        """Switch the default generator to the host stream."""
        self._depth += 1
        if self._depth > 1:
            return
        self._device_state = torch.get_rng_state()
        if self._state is None:
            torch.default_generator.manual_seed(torch.initial_seed())
        else:
            torch.set_rng_state(self._state)

    def __exit__(self, *error: Any) -> None:
        """Keep the host stream's position and give the device its generator back."""
        self._depth -= 1
        if self._depth > 0:
            return
        self._state = torch.get_rng_state()
        assert self._device_state is not None
        torch.set_rng_state(self._device_state)

    def restart(self) -> None:
        """Start again from the process's seed at the next use."""
        self._state = None


def patches() -> tuple[Patch, ...]:
    """Return the records of this module, always the same objects."""
    return _PATCHES


class _NotTheForkWarning(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.getMessage() != _FORK_WARNING


_FILTER = _NotTheForkWarning()


def silence_fork_warning() -> None:
    """Drop the tracker's warning that the CPU generator moved: here it is the one that must move."""
    logging.getLogger(_TRACKER_LOGGER).addFilter(_FILTER)


def unsilence_fork_warning() -> None:
    """Let the tracker's warning through again."""
    logging.getLogger(_TRACKER_LOGGER).removeFilter(_FILTER)


def _get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _instead(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return replacement(*args, **kwargs)

        return stand_in

    return wrap


_HOST = HostStream()


def _on_host_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        with _HOST:
            return original(*args, **kwargs)

    return draw


def _seeds_the_host_too(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def manual_seed(seed: Any) -> Any:
        _HOST.restart()
        return original(seed)

    return manual_seed


_DEVICE = "Dropout draws from the CPU's default generator, so that one takes the part of the device's."
_LOADER = "Data loaders, which one tensor-parallel rank alone has, must not move dropout's generator."


def _torch(target: str, replacement: Callable[..., Any]) -> Patch:
    return Patch(
        name="cpu/" + target.replace(":", "."),
        target=target,
        wrap=_instead(replacement),
        reason=_DEVICE,
        versions=TORCH_VERSIONS,
        distribution="torch",
    )


def _loader(method: str) -> Patch:
    return Patch(
        name=f"cpu/loader{method}",
        target=f"torch.utils.data.dataloader:_BaseDataLoaderIter.{method}",
        wrap=_on_host_stream,
        reason=_LOADER,
        versions=TORCH_VERSIONS,
        distribution="torch",
    )


_PATCHES = (
    _torch("torch.cuda:get_rng_state", _get_state),
    _torch("torch.cuda:set_rng_state", _set_state),
    _torch("torch.cuda:manual_seed", _seed),
    _torch("torch.cuda:manual_seed_all", _seed),
    _torch("torch.cuda.random:get_rng_state", _get_state),
    _torch("torch.cuda.random:set_rng_state", _set_state),
    Patch(
        name="cpu/tracker-get",
        target="megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        wrap=_instead(_get_state),
        reason=_DEVICE,
        parameters=("device", "clone", "graph_safe"),
    ),
    Patch(
        name="cpu/tracker-set",
        target="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        wrap=_instead(_set_state),
        reason=_DEVICE,
        parameters=("new_state", "device", "graph_safe"),
    ),
    Patch(
        name="cpu/seed",
        target="torch:manual_seed",
        wrap=_seeds_the_host_too,
        reason="Seeding torch seeds the host's generator as well as the device's.",
        versions=TORCH_VERSIONS,
        distribution="torch",
    ),
    _loader("__init__"),
    _loader("__next__"),
)
