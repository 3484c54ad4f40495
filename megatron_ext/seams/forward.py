# SPDX-License-Identifier: Apache-2.0
"""Seam: the forward pass, which has to wait for parameters that are still in flight. Nothing here is a patch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

__all__ = ["gather_afresh", "wait_before_use", "will_wait"]

Await = Callable[[Iterable[torch.Tensor]], None]
"""Return once these parameters may be used: on this rank, or gathered from the ranks that share them."""


def wait_before_use(model: Sequence[Any], await_parameters: Await) -> None:
    """Call `await_parameters` before a parameter is used, and with all of a model chunk when its forward pass is over.

    With Megatron's overlapped gathering that is before a bucket is gathered, which Megatron does a bucket ahead of the
    module that uses it; otherwise before the module.

    Args:
        model: the chunks, wrapped in Megatron's DistributedDataParallel.
        await_parameters: called often, at every forward pass.
    """
    for chunk in model:
        if chunk.ddp_config.overlap_param_gather:
            for bucket_group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                _wait_before_gathering(bucket_group, await_parameters)
        else:
            for module in chunk.module.modules():
                if next(module.parameters(recurse=False), None) is not None:
                    module.register_forward_pre_hook(_before(await_parameters))
        # A module that this pass has left out (an expert without tokens) must not miss the optimizer's next step.
        chunk.register_forward_hook(_after(await_parameters))


def will_wait(model: Sequence[Any]) -> bool:
    """Return whether the next forward pass calls what `wait_before_use` was given before parameters are used.

    Megatron gathers parameters in the forward pass only after the first step that was not skipped.

    Args:
        model: as there.
    """
    return all(chunk.remove_forward_pre_hook_handles or not chunk.ddp_config.overlap_param_gather for chunk in model)


def gather_afresh(model: Sequence[Any]) -> None:
    """Let the next forward pass gather what FSDP2 has kept whole since one without a backward pass.

    Args:
        model: the chunks, wrapped or not.
    """
    from torch.distributed.fsdp import FSDPModule

    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _wait_before_gathering(bucket_group: Any, await_parameters: Await) -> None:
    original = bucket_group.start_param_sync

    @functools.wraps(original)
    def start_param_sync(*args: Any, **kwargs: Any) -> Any:
        await_parameters(bucket_group.params)
        return original(*args, **kwargs)

    bucket_group.start_param_sync = start_param_sync


def _before(await_parameters: Await) -> Callable[..., None]:
    def hook(module: torch.nn.Module, *_: Any) -> None:
        await_parameters(module.parameters(recurse=False))

    return hook


def _after(await_parameters: Await) -> Callable[..., None]:
    def hook(chunk: torch.nn.Module, *_: Any) -> None:
        await_parameters(chunk.parameters())

    return hook
