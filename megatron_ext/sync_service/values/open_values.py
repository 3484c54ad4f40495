# SPDX-License-Identifier: Apache-2.0
"""What is known of a round's values before it is made: what the peers have uploaded that alone train a tensor.

Peers take it while they upload their own share and wait for the others, and find out when the round is committed
whether it has become of it what they took: a contribution may not count after all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.frames import Box, Frame, codec_of, cut
from megatron_ext.sync_service.values.contribution import Contribution, Discarded
from megatron_ext.sync_service.values.updates import can_be_cut

__all__ = ["OpenValues"]


class OpenValues:
    """The values of the open round, as far as they are known."""

    def __init__(
        self,
        catalog: Catalog,
        codec: str,
        *,
        sent: Callable[[TensorSpec], Contribution | None],
        merged: frozenset[str],
        reading: threading.Lock | None = None,
    ) -> None:
        """Look at a round.

        Args:
            catalog: the tensors.
            codec: of the contributions: values in fp32, else pseudo-gradients.
            sent: returns the contribution that has all of a tensor, if there is one.
            merged: names of the tensors of which the round makes something else.
            reading: held while a tensor is read whole; one of its own unless given.
        """
        self.catalog = catalog
        self._codec = codec
        self._sent = sent
        self._merged = merged
        self._reading = threading.Lock() if reading is None else reading

    def frames(self, spec: TensorSpec, box: Box, first: int | None, frame_bytes: int) -> Iterator[tuple[bytes, Frame]]:
        """Yield which contribution it is and a frame, for all frames of a box; nothing while they are not known.

        Args:
            spec: the tensor.
            box: of it.
            first: position of the box's first element in the tensor when it has no gaps, else None.
            frame_bytes: of fp32 values in a frame, where they are not sent on as they came.

        Raises:
            Refusal: the contribution is damaged.
        """
        if len(spec.owners) != 1 or spec.name in self._merged:
            return
        # The round codes the tensor as a whole: other blocks of it might come to other values.
        if self._codec != "fp32" and not can_be_cut(self._codec, first, box, spec.numel):
            return
        contribution = self._sent(spec)
        if contribution is None:
            return
        try:
            as_they_came = contribution.frames_of(spec.name, box)
            if as_they_came is not None:
                yield from ((contribution.identity, frame) for frame in as_they_came)
            else:
                # One whole tensor of a run at a time, however many streams ask; a slow stream keeps no other waiting.
                with self._reading:
                    values = contribution.read(spec).view(spec.shape)[box.slices].clone().view(-1)
                for offset, count in cut(box.numel, frame_bytes, codec_of(self._codec).grid):
                    part = values[offset : offset + count]
                    frame = Frame.make(spec.name, spec.shape, box, offset, part, self._codec)
                    yield contribution.identity, frame
        except Discarded:
            return
