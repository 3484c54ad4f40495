# SPDX-License-Identifier: Apache-2.0
"""Limits of what one peer of a run may announce and upload."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.refusal import Refusal

__all__ = ["Limits", "gib"]

_FRAMES, _FRAMES_OF_TENSOR, _BYTES_OF_FRAME = 4096, 64, 4096
"""Of what a contribution may have unless told otherwise. Clients cut frames of no fewer bytes."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one peer of a run may announce and upload; see the fields of the same names of `RunConfig`."""

    max_tensors: int
    """Tensors."""

    max_tensor_bytes: int
    """Bytes of one of them, in fp32."""

    max_model_bytes: int
    """Bytes of all of them, in fp32."""

    max_frames: int | None
    """Frames of a contribution; depends on the tensors when None."""

    max_boxes: int
    """Boxes that a contribution cuts a tensor into."""

    max_journal_bytes: int
    """Bytes that the journal may grow by between two rounds and still take registrations."""

    def check_catalog(self, catalog: Catalog) -> None:
        """Check what a peer announces.

        Raises:
            Refusal: it is too much.
        """
        if len(catalog) > self.max_tensors:
            raise Refusal(
                "invalid",
                f"the catalog has {len(catalog)} tensors, and max_tensors of the run is {self.max_tensors}; raise it "
                "at the server if they are meant",
            )
        largest = max(catalog, key=lambda spec: spec.numel)
        if 4 * largest.numel > self.max_tensor_bytes:
            raise Refusal(
                "invalid",
                f"tensor {largest.name!r} has {gib(4 * largest.numel)} in fp32, and max_tensor_bytes of the run is "
                f"{self.max_tensor_bytes} ({gib(self.max_tensor_bytes)}); raise it at the server if that is meant",
            )
        if catalog.nbytes > self.max_model_bytes:
            raise Refusal(
                "invalid",
                f"the tensors have {gib(catalog.nbytes)} in fp32, and max_model_bytes of the run is "
                f"{self.max_model_bytes} ({gib(self.max_model_bytes)}); raise it at the server if they are meant",
            )

    def check_journal(self, grown: int) -> None:
        """Check that the journal takes a further registration.

        Args:
            grown: bytes that it has grown by since the newest round.

        Raises:
            Refusal: it does not, until there is a round.
        """
        if grown >= self.max_journal_bytes:
            raise Refusal(
                "later",
                f"the journal has grown by {grown} bytes since the newest round, and max_journal_bytes of the run is "
                f"{self.max_journal_bytes}; its lines name who registers again and again, and registrations are taken "
                "after the next round, or when it is raised at the server",
            )

    def frames_of(self, catalog: Catalog) -> int:
        """Return how many frames a contribution may have."""
        if self.max_frames is not None:
            return self.max_frames
        return _FRAMES + _FRAMES_OF_TENSOR * len(catalog) + catalog.nbytes // _BYTES_OF_FRAME


def gib(nbytes: float) -> str:
    """Return a number of bytes for people."""
    return f"{nbytes / 2**30:.4g} GiB"
