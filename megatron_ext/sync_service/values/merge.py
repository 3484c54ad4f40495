# SPDX-License-Identifier: Apache-2.0
"""Merging experts (SPES) as the last thing that happens to a round's values, in the unfinished snapshot on the disk."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.spes import ExpertLayer, MergeConfig, expert_layers, merge_layer
from megatron_ext.sync_service.disk.snapshot_writer import SnapshotWriter
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.values.failpoints import Failpoints

__all__ = ["Merge", "layers_of"]


def layers_of(catalog: Catalog) -> list[ExpertLayer]:
    """Return the layers of a run's model that have routed experts.

    Raises:
        UserError: the experts of a layer do not have the same tensors.
    """
    return expert_layers({spec.name: spec.shape for spec in catalog})


@dataclass(frozen=True, kw_only=True)
class Merge:
    """What one round merges."""

    config: MergeConfig
    """Of the run."""

    alpha: float
    """How much experts take over, above 0."""

    layers: list[ExpertLayer]
    """Whose experts."""

    @classmethod
    def of_round(cls, config: MergeConfig | None, catalog: Catalog, step: int) -> Merge | None:
        """Return what a round merges, None for nothing.

        Args:
            config: of the run; None when it never merges.
            catalog: the tensors.
            step: steps that the peers have made until the round.
        """
        alpha = 0.0 if config is None else config.alpha(step)
        if config is None or alpha == 0:
            return None
        return cls(config=config, alpha=alpha, layers=layers_of(catalog))

    @property
    def names(self) -> frozenset[str]:
        """What the merge changes."""
        return frozenset(name for layer in self.layers for names in layer.tensors.values() for name in names)

    def run(self, snapshot: SnapshotWriter, failpoints: Failpoints) -> None:
        """Merge the values that a snapshot holds, in their place.

        A server that dies here starts the round over: no peer has seen the snapshot, which does not have its name yet.

        Raises:
            OSError: the snapshot cannot be read or written.
        """
        for layer in self.layers:
            merge_layer(
                layer,
                alpha=self.alpha,
                topk=self.config.topk,
                like_official=self.config.like_official,
                read=snapshot.read,
                write=snapshot.overwrite,
            )
            failpoints.hit("layer_merged")
