# SPDX-License-Identifier: Apache-2.0
"""What one rank of a Megatron job holds of the model, as parts of the run's tensors."""

from __future__ import annotations

import torch

from megatron_ext.params import ParameterView, global_views
from megatron_ext.seams.optimizer import InnerValues, is_distributed
from megatron_ext.sync_service.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.frames import Box
from megatron_ext.sync_service.parts import Part, Values

__all__ = ["Slices", "catalog_of"]


def catalog_of(view: ParameterView) -> Catalog:
    """Return the parameters of the whole model, the same for all layouts with equal vocabulary padding."""
    return Catalog(
        TensorSpec(name=tensor.name, shape=tensor.shape, unit=tensor.unit)
        for tensor in view.placement.tensors
        if tensor.kind == "parameter"
    )


class Slices:
    """The rank's authoritative fp32 values, box by box.

    Primary are those of the first of several equal copies: of tensor parallel duplicates, of tied embeddings, and of
    data parallel replicas where the optimizer is not distributed. Over all ranks of a job every element is primary
    once.
    """

    def __init__(self, values: InnerValues, catalog: Catalog) -> None:
        """Find the boxes.

        Args:
            values: the inner values of the rank.
            catalog: the tensors, from `catalog_of`.
        """
        self.parts: list[Part] = []
        self._views: dict[str, torch.Tensor] = {}
        for value in values.values:
            placed = value.entry.placed
            is_shard = is_distributed(values.members[value.member])
            for start, view in global_views(
                placed.slice, value.tensor, value.start, value.start + value.tensor.numel()
            ):
                part = Part(
                    key=f"{placed.name}{list(start)}",
                    spec=catalog[placed.tensor.name],
                    box=Box(start, tuple(view.shape)),
                    is_primary=placed.is_primary and (is_shard or placed.replica == 0),
                )
                self.parts.append(part)
                self._views[part.key] = view

    def read(self) -> Values:
        """Return the values, on the CPU; they share memory with the optimizer's where that is possible."""
        return {key: view.detach().cpu().contiguous() for key, view in self._views.items()}

    @torch.no_grad()
    def write(self, values: Values) -> None:
        """Put values in the place of the optimizer's; the model's parameters are to be refreshed then."""
        for key, view in self._views.items():
            view.copy_(values[key])
