# SPDX-License-Identifier: Apache-2.0
"""A module's buffers across workers: what training changes without an optimizer, such as BatchNorm's statistics.

Only persistent buffers count, those that `state_dict()` has: the others are caches that a module rebuilds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.agreement import workers_in_words
from megatron_ext.local_sgd.plain_torch.parameters import local_part
from megatron_ext.outer.digest import tensor_digest
from megatron_ext.phrases import plural
from megatron_ext.transport.collectives import collective_device

__all__ = ["SharedBuffers", "persistent_buffers", "plans_for_buffers", "refuse_unfit_buffers"]


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return by name the memory of the buffers that a module's state has, each once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                found.setdefault(id(buffer), (name, local_part(buffer)))
    return dict(found.values())


def refuse_unfit_buffers(model: torch.nn.Module, across: Any, share: bool, apart: bool, by_time: bool) -> None:
    """Refuse buffers that cannot be shared as was asked for.

    Args:
        model: the module.
        across: the group with one rank of every worker.
        share: whether they are to be made equal wherever workers meet.
        apart: whether no round brings all workers together.
        by_time: whether workers make different numbers of steps.

    Raises:
        UserError: it cannot be done, or workers would wait in DDP for others that do not come.
    """
    names = list(persistent_buffers(model))
    if names and share and apart:
        raise UserError(
            f"buffer {names[0]} cannot be averaged: with reducer='pairwise' or eager=True no round waits for all "
            "workers; leave every worker its own (buffers='own')"
        )
    if by_time and _broadcasts_buffers(model, across):
        raise UserError(
            "use_async: DDP sends buffers to all workers in every forward pass, and they make different numbers of "
            "them; give DDP broadcast_buffers=False"
        )


def plans_for_buffers(model: torch.nn.Module, across: Any, share: bool) -> list[str]:
    """Return the notices about a module's buffers when it is attached, a line each; see `refuse_unfit_buffers`."""
    names = list(persistent_buffers(model))
    if not names:
        return []
    each = f"{plural(len(names), 'buffer')} of the module ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
    plan = "made equal wherever workers meet, by their mean" if share else "every worker keeps its own"
    lines = [f"{each}: {plan} (buffers={'average' if share else 'own'!r})"]
    if _broadcasts_buffers(model, across):
        lines.append("DDP sends all workers the first one's buffers in every step; give it broadcast_buffers=False")
    return lines


def _broadcasts_buffers(model: torch.nn.Module, across: Any) -> bool:
    """Return whether DDP gives all workers the first one's buffers in every forward pass.

    Args:
        model: the module.
        across: the group with one rank of every worker.
    """
    workers = set(dist.get_process_group_ranks(across))
    return any(
        module.broadcast_buffers
        and any(True for _ in module.buffers())
        and len(workers.intersection(dist.get_process_group_ranks(module.process_group))) > 1
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
    )


class SharedBuffers:
    """Makes a module's buffers equal on all workers, wherever they meet."""

    def __init__(self, model: torch.nn.Module, across: Any) -> None:
        """Take note of the module's persistent buffers, of the same names, shapes and dtypes on all workers.

        Args:
            model: the module.
            across: process group of the ranks that hold the same values, one per worker, in worker order.
        """
        self._model = model
        self._across = across
        self._sizes = {name: buffer.numel() for name, buffer in persistent_buffers(model).items()}

    @torch.no_grad()
    def meet(self) -> list[str]:
        """Give every worker the mean of what differs; all ranks of `across` must call it.

        Means are taken element by element, of the workers whose buffer is finite; elements that are equal everywhere
        keep their bits. What is not a floating-point number (BatchNorm's count of batches) is taken from the first
        worker.

        Returns:
            What there is to say, a line each.

        Raises:
            UserError: a buffer has another size than at the start.
        """
        if not self._sizes:
            return []
        present = persistent_buffers(self._model)
        buffers = [present.get(name) for name in self._sizes]
        rows = [(0, 0, -1) if each is None else (*tensor_digest([each]), each.numel()) for each in buffers]
        table = self._gather(torch.tensor(rows, dtype=torch.int64)).cpu()
        self._refuse_other_sizes(table[..., 2])
        differs = (table != table[:1]).any(dim=2).any(dim=0).tolist()
        chosen = [
            (name, buffer)
            for name, buffer, is_different in zip(self._sizes, buffers, differs, strict=True)
            if is_different and buffer is not None
        ]
        return self._share(chosen) if chosen else []

    def _share(self, chosen: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
        """Make these buffers, given with their names, equal."""
        own = torch.cat([buffer.contiguous().reshape(-1).view(torch.uint8) for _, buffer in chosen])
        everyone = self._gather(own)
        lines, start = [], 0
        for name, buffer in chosen:
            stop = start + buffer.numel() * buffer.element_size()
            # A copy begins where its dtype may begin.
            values = torch.stack([row[start:stop].clone().view(buffer.dtype) for row in everyone])
            common, left_out = _common(values)
            buffer.copy_(common.view(buffer.shape))
            if left_out:
                lines.append(
                    f"buffer {name} is non-finite on {workers_in_words(left_out)}, which the mean over the workers "
                    "leaves out"
                )
            start = stop
        return lines

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return a tensor of all workers, stacked in their order."""
        own = own.to(collective_device(self._across))
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(self._across))]
        dist.all_gather(everyone, own, group=self._across)
        return torch.stack(everyone)

    def _refuse_other_sizes(self, sizes: torch.Tensor) -> None:
        """Refuse buffers that were replaced by others of another size on some worker.

        Args:
            sizes: their elements, (workers, buffers); -1 for none.
        """
        for place, (name, expected) in enumerate(self._sizes.items()):
            others = [worker for worker, size in enumerate(sizes[:, place].tolist()) if size != expected]
            if others:
                raise UserError(
                    f"buffer {name} had {expected} elements when local SGD began, and no longer has on "
                    f"{workers_in_words(others)}; register it as not persistent if it is a cache, or leave every "
                    "worker its own (buffers='own')"
                )


def _common(values: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Return what all workers take of (workers, elements), and the workers that were left out."""
    if not (values.is_floating_point() or values.is_complex()):
        return values[0], []
    wide = values.to(torch.complex128 if values.is_complex() else torch.float64)
    finite = torch.isfinite(wide).all(dim=1)
    # A mask's infinities are the same everywhere, and no worker's fault.
    same = (wide == wide[:1]).all(dim=0) | wide.isnan().all(dim=0)
    if bool(same.all()):
        return values[0], []
    kept = finite if bool(finite.any()) else torch.ones_like(finite)
    mean = wide[kept].sum(dim=0) / int(kept.sum())
    left_out = (~kept).nonzero().reshape(-1).tolist()
    return torch.where(same, values[0], mean.to(values.dtype)), left_out
