# SPDX-License-Identifier: Apache-2.0
"""What one rank of a Megatron job holds of the model, as parts of the run's tensors."""

from __future__ import annotations

import torch

from megatron_ext.params import GlobalTensor, LocalParameter, ParameterView, global_views
from megatron_ext.params.router_biases import RouterBiases
from megatron_ext.seams.optimizer import InnerValues
from megatron_ext.spes.ownership import Ownership
from megatron_ext.sync_service.peer.parts import Part, Values
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.frames import Box

__all__ = ["Slices", "catalog_of"]


def catalog_of(view: ParameterView, peers: int, ownership: Ownership | None = None) -> Catalog:
    """Return the tensors of the whole model, the same for all layouts with equal vocabulary padding.

    Args:
        view: of a rank.
        peers: how many the run has.
        ownership: which peers train which experts; all train everything unless given.
    """

    def owners_of(tensor: GlobalTensor) -> tuple[int, ...]:
        if tensor.kind == "buffer":
            # What has owners does not belong to an outer optimizer: of routers' biases all have the mean.
            return tuple(range(peers))
        return () if ownership is None else ownership.owners_of(tensor.name)

    return Catalog(
        TensorSpec(name=tensor.name, shape=tensor.shape, unit=tensor.unit, owners=owners_of(tensor))
        for tensor in view.placement.tensors
    )


class Slices:
    """The rank's authoritative values, box by box: those of its optimizer, the biases of routers, and the frozen
    parameters themselves.

    Primary are those of the first of several equal copies: of tensor parallel duplicates, of tied embeddings, and of
    data parallel replicas where the optimizer is not distributed, or has several instances. Over all ranks of a job
    every element is primary once.
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
            self._add(catalog, value.entry, value.tensor, value.start, value.counts_once)
        for entry in RouterBiases(values.view).entries:
            self._add(catalog, entry, entry.parameter, 0, entry.placed.counts_once(is_shard=False))
        trained = set(self._views)
        for entry in values.view.entries:
            if not entry.parameter.requires_grad:
                self._add(catalog, entry, entry.parameter.detach(), 0, entry.placed.counts_once(is_shard=False))
        self._frozen = self._views.keys() - trained

    def _add(self, catalog: Catalog, entry: LocalParameter, tensor: torch.Tensor, start: int, is_primary: bool) -> None:
        """Add the boxes of a tensor that holds a parameter from its flattened element `start` on."""
        placed = entry.placed
        for at, view in global_views(placed.slice, tensor, start, start + tensor.numel()):
            part = Part(
                key=f"{placed.name}{list(at)}",
                spec=catalog[placed.tensor.name],
                box=Box(at, tuple(view.shape)),
                is_primary=is_primary,
            )
            self.parts.append(part)
            self._views[part.key] = view

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return next(iter(self._views.values())).device

    def read(self, *, frozen: bool = True, copy: bool = False) -> Values:
        """Return the values as fp32 on the CPU; they share memory with the optimizer's where that is possible.

        Args:
            frozen: those of frozen parameters too.
            copy: share no memory.
        """
        return {
            key: view.detach().to("cpu", torch.float32, copy=copy).contiguous()
            for key, view in self._views.items()
            if frozen or key not in self._frozen
        }

    def frozen(self, key: str) -> torch.Tensor | None:
        """Return the values of a frozen part on the CPU; None for another one, and where they are not in fp32."""
        view = self._views[key]
        exact = key in self._frozen and view.dtype == torch.float32
        return view.detach().to("cpu") if exact else None

    @torch.no_grad()
    def write(self, values: Values) -> None:
        """Put values in the place of the optimizer's; the model's parameters are to be refreshed then."""
        for key in self._views:
            self.put(key, values[key])

    @torch.no_grad()
    def put(self, key: str, value: torch.Tensor) -> None:
        """Put the value of one part in the place of the optimizer's, see `write`."""
        self._views[key].copy_(value)
