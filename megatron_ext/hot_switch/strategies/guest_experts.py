# SPDX-License-Identifier: Apache-2.0
"""How guests cut experts where the command line speaks of home alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_ext.hot_switch.strategies.strategy import Strategy

__all__ = ["experts_fit", "experts_of_guest"]


def experts_fit(strategy: Strategy, *, stages_before_replicas: bool) -> bool:
    """Return whether a strategy's ranks can hold experts as its `ep` and `etp` say.

    Args:
        strategy: with usable sizes.
        stages_before_replicas: whether ranks are numbered like that (`--use-tp-pp-dp-mapping`), for which Megatron
            needs as many replicas of experts as of the rest, models without experts included.
    """
    cut = strategy.expert_tp * strategy.ep
    if stages_before_replicas and strategy.pp > 1 and cut != strategy.tp * strategy.cp:
        return False
    return strategy.world_size % (cut * strategy.pp) == 0


def experts_of_guest(guest: Strategy, home: Strategy, *, has_experts: bool, stages_before_replicas: bool) -> Strategy:
    """Return a guest with `ep` and `etp` that fit its ranks, and as near as possible to home's.

    These are the command line's, if they fit; else the greatest part of home's `ep` with home's `etp`, the guest's own
    `tp`, or whole experts, whichever fits first. Of a model with experts a guest with tensor parallelism has sequence
    parallelism as well, without which Megatron does not train it.

    Args:
        guest: with its sizes, and the command line's `ep`, `etp` and sequence parallelism.
        home: likewise.
        has_experts: whether the model has some.
        stages_before_replicas: as for `experts_fit`.
    """
    if has_experts and guest.tp > 1:
        guest = replace(guest, sequence_parallel=True)
    for ep, etp in [(guest.ep, guest.etp), *_candidates(guest, home)]:
        found = replace(guest, ep=ep, etp=etp)
        if experts_fit(found, stages_before_replicas=stages_before_replicas):
            return found
    return guest


def _candidates(guest: Strategy, home: Strategy) -> Iterator[tuple[int, int]]:
    together = guest.tp * guest.cp
    for ep in range(home.ep, 0, -1):
        if home.ep % ep == 0:
            for etp in (home.expert_tp, guest.tp, 1, together // ep if together % ep == 0 else 1):
                yield ep, etp
