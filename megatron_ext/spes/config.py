# SPDX-License-Identifier: Apache-2.0
"""Configuration of a SPES peer: the keys of the paper's code, and what is added to them."""

# Annotations are evaluated here (no postponed evaluation): Megatron's argument factory reads the types.

import argparse
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_ext.config_options import WITHOUT_FLAG, FromArgs, flag
from megatron_ext.errors import UserError, combine
from megatron_ext.spes.ownership import Ownership
from megatron_ext.sync_service.channel.address import split_address

__all__ = ["SpesConfig"]

# Names of their own, because Megatron's argument factory complains about tuples, whose parsing the fields describe.
type Shares = tuple[int, ...]
type Owners = tuple[tuple[int, ...], ...]


def _peers(text: str) -> tuple[int, ...]:
    """Return the ids in a word such as '0,2'."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} names no peers; write their ids as in 0,2") from error


def _key(default: Any) -> Any:
    """Return a field that a file can give and a command line gives in another way."""
    return field(default=default, metadata={WITHOUT_FLAG: True})


@dataclass(frozen=True, kw_only=True)
class SpesConfig(FromArgs):
    """This job is one of the peers that train a mixture of experts together, each a part of the experts (SPES)."""

    using_spes: bool = False
    """Train this job's own experts and what is shared; freeze the other experts, which the other peers train."""

    using_dilico: bool = False
    """With --using-spes: train all experts at every peer, and average them like everything else (FedAvg, or DiLoCo with
    an outer optimizer at the server)."""

    server_addr: str | None = _key(None)
    """HOST:PORT of the sync service (--sync-service)."""

    num_peers: int | None = _key(None)
    """Number of peers (--sync-service-peers)."""

    peer_id: int | None = _key(None)
    """Which one this job is, from 0 (--sync-service-index)."""

    sync_steps: int = _key(100)
    """Steps between two rounds (--sync-service-interval)."""

    num_train_experts_per_node: int | None = flag("--spes-num-train-experts-per-node", None, type=int)
    """Experts of a layer that every peer owns. Times the number of peers it must be the number of experts; equal to the
    number of experts, all peers train all of them."""

    expert_assignment: Literal["contiguous", "interleaved"] = flag(
        "--spes-expert-assignment", "contiguous", type=str, choices=["contiguous", "interleaved"]
    )
    """Which experts a peer owns: 'contiguous' = a block of neighbours, as in the paper; 'interleaved' = every
    number-of-peers-th one, so that with expert parallelism all ranks have some that train."""

    experts_per_peer: Shares | None = flag(  # noqa: RUF009  # a field; the rule does not see through the alias
        "--spes-experts-per-peer", None, type=int, nargs="+"
    )
    """In place of --spes-num-train-experts-per-node, where peers are unequal: how many experts each of them owns."""

    expert_owners: Owners | None = flag(  # noqa: RUF009  # likewise
        "--spes-expert-owners", None, type=_peers, nargs="+"
    )
    """In place of all of these: the owners of expert 0, expert 1, ..., such as '0 0,1 1'. What several peers own is
    averaged over them."""

    using_decayed_aux_loss: bool = flag("--spes-using-decayed-aux-loss", False)
    """Let this peer's experts look less loaded to the load-balancing loss at first, so that they get more tokens: their
    counts are weighted by 0.7, which grows to 1 during the first fifth of the training."""

    decayed_factor_update_steps: int = flag("--spes-decayed-factor-update-steps", 500)
    """With --spes-using-decayed-aux-loss: steps between two changes of that weight."""

    quant_non_local_trainable_experts: bool = _key(False)
    """Has no effect in the paper's code either, and is refused."""

    def problems(self) -> list[str]:
        """Return the problems of the values by themselves, one sentence each."""
        if not self.using_spes:
            changed = [
                name
                for name, entry in self.__dataclass_fields__.items()
                if getattr(self, name) != entry.default and not entry.metadata.get(WITHOUT_FLAG)
            ]
            return [f"{name} has no effect without using_spes; add it or drop {name}" for name in changed]
        found = []
        for name, allowed, rule in (
            ("num_peers", self.num_peers is None or self.num_peers >= 1, "it must be 1 or more"),
            ("sync_steps", self.sync_steps >= 1, "it must be 1 or more"),
            ("decayed_factor_update_steps", self.decayed_factor_update_steps >= 1, "it must be 1 or more"),
            ("peer_id", self.peer_id is None or self.peer_id >= 0, "it must be 0 or more"),
        ):
            if not allowed:
                found.append(f"{name} is {getattr(self, name)}; {rule}")
        if self.server_addr is not None and split_address(self.server_addr) is None:
            found.append(f"server_addr is {self.server_addr!r}; give HOST:PORT, such as 127.0.0.1:50051")
        if self.num_peers is not None and self.peer_id is not None and self.peer_id >= self.num_peers >= 1:
            found.append(f"peer_id is {self.peer_id}; with num_peers {self.num_peers} it must be below that")
        if self.quant_non_local_trainable_experts:
            found.append("quant_non_local_trainable_experts has no effect, not in the paper's code either; drop it")
        ways = ("num_train_experts_per_node", "experts_per_peer", "expert_owners")
        given = [name for name in ways if getattr(self, name) is not None]
        if self.using_dilico:
            given = [name for name in given if name != "num_train_experts_per_node"]
            found += [f"{name} has no effect with using_dilico, where all peers train all; drop one" for name in given]
            if self.using_decayed_aux_loss:
                found.append("using_decayed_aux_loss has no effect with using_dilico; drop one of them")
        elif len(given) != 1:
            said = f"{' and '.join(given)} are given" if given else "nothing says who owns which experts"
            found.append(f"{said}; give one of {', '.join(ways)}")
        every = self.decayed_factor_update_steps
        if every != type(self).decayed_factor_update_steps and not self.using_decayed_aux_loss:
            found.append(
                "decayed_factor_update_steps has no effect without using_decayed_aux_loss; add it or drop "
                "decayed_factor_update_steps"
            )
        if self.expert_owners is not None and self.expert_assignment != "contiguous":
            found.append("expert_assignment has no effect with expert_owners; drop one of them")
        return found

    def ownership(self, peers: int, experts: int) -> Ownership:
        """Return the owners of the experts.

        Args:
            peers: number of peers.
            experts: number of experts of a layer.

        Raises:
            UserError: the values cannot be used, or do not fit the model or the number of peers.
        """
        found = self.problems()
        if self.num_peers not in (None, peers):
            found.append(f"num_peers is {self.num_peers}, and there are {peers} peers; give the same number everywhere")
        if found:
            raise combine(found, "spes_config")
        if self.using_dilico:
            return self._everyone(peers, experts)
        if self.expert_owners is not None:
            return Ownership.of_map(peers, experts, self.expert_owners)
        each = self.num_train_experts_per_node
        if each == experts:
            return Ownership.everyone(peers, experts)
        if each is not None and each * peers != experts:
            raise UserError(
                f"num_train_experts_per_node is {each}, which with {peers} peers makes {each * peers} experts, and the "
                f"model has {experts} per layer; give {_fitting(peers, experts)}"
            )
        build = Ownership.interleaved if self.expert_assignment == "interleaved" else Ownership.contiguous
        return build(peers, experts, self.experts_per_peer)

    def _everyone(self, peers: int, experts: int) -> Ownership:
        each = self.num_train_experts_per_node
        if each not in (None, experts):
            raise UserError(
                f"num_train_experts_per_node is {each}; with using_dilico all {experts} experts are trained: give that "
                "number, or drop one of the two"
            )
        return Ownership.everyone(peers, experts)


def _fitting(peers: int, experts: int) -> str:
    if experts % peers == 0:
        return f"{experts // peers} (or {experts} to train all experts at every peer)"
    return f"experts_per_peer, {peers} numbers that add up to {experts}"
