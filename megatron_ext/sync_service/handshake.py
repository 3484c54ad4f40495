# SPDX-License-Identifier: Apache-2.0
"""Whether a peer that registers fits its run; what does not is named."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.sync_service.catalog import Catalog
from megatron_ext.sync_service.frames import codec_of
from megatron_ext.sync_service.refusal import Refusal

__all__ = ["check_against", "check_alone"]


def check_alone(peers: int, config: Mapping[str, str], catalog: Catalog) -> None:
    """Check what a peer brings by itself.

    Args:
        peers: number of places of the run.
        config: what must be the same for all peers, by the field's name.
        catalog: the tensors.

    Raises:
        Refusal: the codec is unknown, or an owner is none of the peers.
    """
    codec_of(config.get("codec", ""))
    for spec in catalog:
        if spec.owners and spec.owners[-1] >= peers:
            raise Refusal("invalid", f"tensor {spec.name!r} has the owner {spec.owners[-1]}; there are {peers} peers")


def check_against(
    agreed: Mapping[str, str], known: Catalog, peer: str, config: Mapping[str, str], catalog: Catalog
) -> None:
    """Check that a peer brings what the run's first one did.

    Args:
        agreed: fields of the run.
        known: tensors of the run.
        peer: who registers.
        config: its fields.
        catalog: its tensors.

    Raises:
        Refusal: something differs.
    """
    for field in sorted(agreed.keys() | config.keys()):
        wanted, found = agreed.get(field), config.get(field)
        if wanted != found:
            raise Refusal("state", f"config field {field!r} is {found!r} at peer {peer!r} and {wanted!r} in the run")
    difference = known.difference(catalog)
    if difference is not None:
        raise Refusal("state", f"the catalog of peer {peer!r} is not the run's: {difference}")
