# SPDX-License-Identifier: Apache-2.0
"""Anchors and outer states in the host's memory, from which they visit the device for their outer step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

import torch

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.exchange.free_memory import free_memory

__all__ = ["HostMemory", "require_room"]


class HostMemory:
    """Lends the device copies of tensors that live on the host, and brings home what changed.

    A tensor stays the same object while it is away: only its memory is exchanged. So optimizers that know their
    parameters by identity work on it as on any other. On a GPU the host's memory is pinned, and copies travel on a
    stream of their own: what comes next while the outer step of this works, and back while that of the next does.
    """

    def __init__(self, device: torch.device) -> None:
        """Prepare.

        Args:
            device: where tensors visit. On "cpu" they are copied from memory to memory, which only shows that the bits
                are the same.
        """
        self._device = device
        # torch leaves streams unannotated.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._coming: dict[int, torch.Tensor] = {}
        """Copies in flight to the device, by the identity of what they are a copy of."""

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor in the host's memory."""
        home = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._stream is not None)
        return home.copy_(tensor)

    def expect(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let tensors set out for the device: they are to visit next."""
        if self._stream is None:
            return
        # After the copies back on this stream, and in parallel to the device's computations.
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                if id(tensor) not in self._coming:
                    self._coming[id(tensor)] = tensor.detach().to(self._device, non_blocking=True)

    @contextlib.contextmanager
    def visit(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        changed: bool,
        following: Sequence[torch.Tensor] = (),
        new: Callable[[], Sequence[torch.Tensor]] = list,
    ) -> Iterator[None]:
        """Have tensors on the device.

        Args:
            tensors: on the host before and afterwards.
            changed: whether they must be brought home.
            following: those that visit next, after which this one does not wait.
            new: called at the end, returns tensors that came into being meanwhile; they find a home, too.
        """
        self.expect(tensors)
        self._arrive()
        homes = [tensor.data for tensor in tensors]
        for tensor in tensors:
            tensor.data = self._coming.pop(id(tensor)) if self._stream else tensor.detach().clone()
        self.expect(following)
        try:
            yield
        finally:
            self._leave(tensors, homes, changed)
        for tensor in new():
            tensor.data = self.keep(tensor.detach())

    def settle(self) -> None:
        """Wait until everything is home; what was expected and did not visit is forgotten."""
        self._coming.clear()
        if self._stream is not None:
            self._stream.synchronize()

    def _arrive(self) -> None:
        """Let the device's computations wait for what is in flight."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _leave(self, tensors: Sequence[torch.Tensor], homes: Sequence[torch.Tensor], changed: bool) -> None:
        """Give tensors their home memory back, with what they hold now if that changed."""
        visitors = [tensor.data for tensor in tensors]
        for tensor, home in zip(tensors, homes, strict=True):
            tensor.data = home
        if self._stream is not None:
            # The visitors' memory is that stream's, which gives it to the next ones once the work on these is done.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if not changed:
            return
        if self._stream is None:
            for home, visitor in zip(homes, visitors, strict=True):
                home.copy_(visitor)
            return
        with torch.cuda.stream(self._stream):
            for home, visitor in zip(homes, visitors, strict=True):
                home.copy_(visitor, non_blocking=True)
                visitor.record_stream(self._stream)


def require_room(needed: int, available: int | None = None, processes: int | None = None) -> None:
    """Check that every process of this machine finds room for as much as this one needs.

    Args:
        needed: bytes of this process.
        available: bytes of free memory; what the machine and its control groups leave when None.
        processes: training processes of the machine; torchrun's number when None.

    Raises:
        UserError: there is less.
    """
    if available is None:
        available = free_memory()
    if processes is None:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if needed * processes > available:
        raise UserError(
            f"--local-sgd-cpu-offload: anchor and outer state of {processes} processes take "
            f"{needed * processes / 2**30:.2f} GiB of memory, and {available / 2**30:.2f} GiB are free; "
            "drop the option, use more workers (each keeps its part), or an outer optimizer with less state"
        )
