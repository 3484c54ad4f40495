# SPDX-License-Identifier: Apache-2.0
"""As many and as small frames as a peer can make of a tensor."""

import torch

from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.frames import Box, Frame, whole_box

SIDE = 80
ONE = torch.ones(1)


def catalog_of(*shapes: tuple[int, ...]) -> Catalog:
    return Catalog(TensorSpec(name=f"t{at}", shape=shape) for at, shape in enumerate(shapes))


def dots(count: int) -> list[Frame]:
    """Return frames that are boxes of one element of a tensor of SIDE x SIDE."""
    shape = (SIDE, SIDE)
    return [Frame.make("t0", shape, Box(divmod(at, SIDE), (1, 1)), 0, ONE) for at in range(count)]


def pieces(count: int) -> list[Frame]:
    """Return frames of one element of the whole of such a tensor."""
    shape = (SIDE, SIDE)
    return [Frame.make("t0", shape, whole_box(shape), at, ONE) for at in range(count)]
