# SPDX-License-Identifier: Apache-2.0
"""Which of several server processes has which tensors.

Whole units go to one shard, and so do all experts of a layer: what is judged, clipped or merged together never needs
another shard. The largest come first, each to the shard that has the fewest bytes yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.phrases import plural
from megatron_ext.spes import expert_layer_of
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.refusal import Refusal

__all__ = ["assign", "part_of"]


def assign(catalog: Catalog, shards: int) -> tuple[int, ...]:
    """Return the shards of the tensors, in the order of the catalog; a function of the catalog and the number alone.

    Args:
        catalog: the tensors.
        shards: how many there are.

    Raises:
        Refusal: there is not something for every shard.
    """
    groups = _groups(catalog)
    sizes: dict[str, int] = {}
    for spec, group in zip(catalog, groups, strict=True):
        sizes[group] = sizes.get(group, 0) + spec.numel
    if len(sizes) < shards:
        raise Refusal(
            "state",
            f"the model has {plural(len(sizes), 'unit')} (layers, or tensors without one), each of which is on one "
            f"shard, and there are {shards} shards; give fewer shards",
        )
    loads = [0] * shards
    shard_of = {}
    for group in sorted(sizes, key=lambda group: -sizes[group]):
        shard = loads.index(min(loads))
        shard_of[group] = shard
        loads[shard] += sizes[group]
    return tuple(shard_of[group] for group in groups)


def part_of(catalog: Catalog, shard_of: Sequence[int], shard: int) -> Catalog:
    """Return the tensors that a shard has."""
    return Catalog(spec for spec, place in zip(catalog, shard_of, strict=True) if place == shard)


def _groups(catalog: Catalog) -> list[str]:
    """Return of every tensor what it has to stay together with, called after a unit in it."""
    units = [spec.unit or spec.name for spec in catalog]
    leader = {unit: unit for unit in units}
    unit_of_layer: dict[str, str] = {}
    for spec, unit in zip(catalog, units, strict=True):
        layer = expert_layer_of(spec.name)
        first = unit if layer is None else unit_of_layer.setdefault(layer, unit)
        if leader[first] != leader[unit]:
            old, new = leader[unit], leader[first]
            leader = {name: new if found == old else found for name, found in leader.items()}
    return [leader[unit] for unit in units]
