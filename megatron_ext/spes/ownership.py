# SPDX-License-Identifier: Apache-2.0
"""Who trains which experts (SPES, arXiv 2602.11543).

A peer trains the experts that it owns, the same ones in every layer, and everything that is shared. What it does not
own stays as it is at this peer until the next round brings what the owners made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.errors import UserError, combine
from megatron_ext.spes.experts import expert_of

__all__ = ["Ownership"]


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """The owners of all experts."""

    peers: int
    """Number of peers; their ids are 0 to `peers` - 1."""

    owners: tuple[tuple[int, ...], ...]
    """For every expert, by its global number, the peers that train it, ascending. Of several the mean is taken."""

    def __post_init__(self) -> None:
        """Check that every expert has owners and every peer experts.

        Raises:
            UserError: something is wrong; names every problem.
        """
        found = []
        for expert, peers in enumerate(self.owners):
            if not peers:
                found.append(f"expert {expert} has no owner; give it one")
            if list(peers) != sorted(set(peers)):
                found.append(f"expert {expert} has the owners {_text(peers)}; name each once, ascending")
            found += [
                f"expert {expert} has the owner {peer}; there are the peers 0 to {self.peers - 1}"
                for peer in peers
                if not 0 <= peer < self.peers
            ]
        owning = {peer for peers in self.owners for peer in peers}
        idle = [peer for peer in range(self.peers) if peer not in owning]
        if idle:
            found.append(f"peer {_text(idle)} owns no expert; give every peer at least one, or have fewer peers")
        if found:
            raise combine(found, "expert ownership")

    @classmethod
    def contiguous(cls, peers: int, experts: int, shares: Sequence[int] | None = None) -> Ownership:
        """Return blocks of neighbouring experts, as in the paper: peer 0 has the first ones.

        Args:
            peers: number of peers.
            experts: number of experts of a layer.
            shares: how many experts each peer owns; the same number unless given.

        Raises:
            UserError: the shares do not add up.
        """
        counts = _shares(peers, experts, shares)
        return cls(peers=peers, owners=tuple((peer,) for peer in range(peers) for _ in range(counts[peer])))

    @classmethod
    def interleaved(cls, peers: int, experts: int, shares: Sequence[int] | None = None) -> Ownership:
        """Return experts dealt out in turn: expert e to peer e mod `peers`, passing by those who have their share.

        With expert parallelism inside a peer every rank then has experts that train.

        Args:
            peers: number of peers.
            experts: number of experts of a layer.
            shares: how many experts each peer owns; the same number unless given.

        Raises:
            UserError: the shares do not add up.
        """
        left = _shares(peers, experts, shares)
        owners: list[tuple[int, ...]] = []
        while len(owners) < experts:
            for peer in range(peers):
                if left[peer] > 0:
                    left[peer] -= 1
                    owners.append((peer,))
        return cls(peers=peers, owners=tuple(owners))

    @classmethod
    def of_map(
        cls, peers: int, experts: int, owners: Sequence[Sequence[int]] | Mapping[int, Sequence[int]]
    ) -> Ownership:
        """Return an ownership that is given expert by expert; an expert may have several owners.

        Args:
            peers: number of peers.
            experts: number of experts of a layer.
            owners: the owners of every expert.

        Raises:
            UserError: experts are missing or unknown, or have no or unknown owners.
        """
        given = dict(owners) if isinstance(owners, Mapping) else dict(enumerate(owners))
        if given.keys() != set(range(experts)):
            missing, unknown = sorted(set(range(experts)) - given.keys()), sorted(given.keys() - set(range(experts)))
            said = [f"expert {_text(missing)} is missing"] if missing else []
            said += [f"there is no expert {_text(unknown)}"] if unknown else []
            raise UserError(f"expert_owners: {', and '.join(said)}; name the experts 0 to {experts - 1}")
        return cls(peers=peers, owners=tuple(tuple(sorted(given[expert])) for expert in range(experts)))

    @classmethod
    def everyone(cls, peers: int, experts: int) -> Ownership:
        """Return that all peers own all experts, which then are averaged like everything else (FedAvg, DiLoCo)."""
        return cls(peers=peers, owners=(tuple(range(peers)),) * experts)

    @property
    def experts(self) -> int:
        """Number of experts of a layer."""
        return len(self.owners)

    def owned_by(self, peer: int) -> tuple[int, ...]:
        """Return the experts that a peer trains, ascending."""
        return tuple(expert for expert, peers in enumerate(self.owners) if peer in peers)

    def is_trained(self, name: str, peer: int) -> bool:
        """Return whether a peer trains a tensor.

        Args:
            name: global name of the tensor.
            peer: id of the peer.
        """
        owners = self.owners_of(name)
        return not owners or peer in owners

    def owners_of(self, name: str) -> tuple[int, ...]:
        """Return the owners of a tensor in the form of the sync service's catalog.

        Args:
            name: global name of the tensor.

        Returns:
            Ids of peers, ascending; empty for what all peers train.

        Raises:
            UserError: the tensor belongs to an expert that is not known.
        """
        expert = expert_of(name)
        if expert is None:
            return ()
        if expert >= self.experts:
            raise UserError(
                f"tensor {name!r} is of expert {expert}; ownership knows the experts 0 to {self.experts - 1}"
            )
        return () if len(self.owners[expert]) == self.peers else self.owners[expert]


def _shares(peers: int, experts: int, shares: Sequence[int] | None) -> list[int]:
    """Return how many experts every peer owns."""
    if shares is None:
        if experts % peers:
            raise UserError(
                f"{experts} experts cannot be shared out evenly to {peers} peers; say in experts_per_peer how many "
                "each owns"
            )
        return [experts // peers] * peers
    if len(shares) != peers:
        raise UserError(f"experts_per_peer has {len(shares)} numbers; give one for each of the {peers} peers")
    if min(shares) < 1 or sum(shares) != experts:
        raise UserError(
            f"experts_per_peer is {_text(shares)}, which makes {sum(shares)}; give numbers of 1 or more that add "
            f"up to the {experts} experts of a layer"
        )
    return list(shares)


def _text(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
