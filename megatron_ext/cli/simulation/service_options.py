# SPDX-License-Identifier: Apache-2.0
"""Options of a peer, and fields of a run at the server, as `simulate sync-service` takes or refuses them."""

from __future__ import annotations

from dataclasses import fields

from megatron_ext.cli.simulation.simulated_flags import DECIDES_NOTHING, ProductFlags
from megatron_ext.config_options import WITHOUT_FLAG, flag_of
from megatron_ext.phrases import as_field

__all__ = ["peer_flags", "why_refused"]

_SIMULATED = frozenset(
    (
        *("sync_service_interval", "sync_service_interval_seconds", "sync_service_delay", "sync_service_codec"),
        "sync_service_heartbeat_seconds",
    )
)

_REASONS = {
    "sync_service": "is where a run's server is, and a simulation has one of its own; drop it",
    "sync_service_peers": "is --peers here; give that",
    "sync_service_run": "names a run at a server, and a simulation has one alone; drop it",
    "sync_service_peer": "names one peer, and a simulation has all; drop it",
    "sync_service_index": "is of one peer, and a simulation has all; drop it",
    "sync_service_streams": "decides how much of a link is reached; give what is reached as --bandwidth",
    "sync_service_round_seconds": "ends a peer that waits, which no simulated one does; drop it",
    "sync_service_patience_seconds": "is for a server that is away, which the simulated one never is; drop it",
}

_OF_EXPERTS = "is of experts that owners train, which are not simulated; drop it"

_BEGIN_SPES = ("--spes-config", "--using-spes")

_OF_THE_RUN = {
    "sync_steps": "is --sync-service-interval here; give that",
    "max_norm": "is a limit to values, of which a simulation has none; drop it",
    **dict.fromkeys(("merge_interval", "merge_alpha_start", "merge_decay_steps", "merge_topk"), _OF_EXPERTS),
    "merge_like_official": _OF_EXPERTS,
}
"""By field of a run at the server, why it is refused where it decides over time or bytes."""


def peer_flags() -> ProductFlags:
    """Return the options of a peer."""
    from megatron_ext.sync_service.megatron.arguments import SyncServiceConfig

    return ProductFlags((SyncServiceConfig,), _SIMULATED, _REASONS)


def why_refused(word: str) -> str | None:
    """Return why an option that is none of a simulation's is refused; None where no peer or server has it either.

    Args:
        word: of the command line.
    """
    # Not at the start of every command: they import torch.
    from megatron_ext.spes.config import SpesConfig
    from megatron_ext.sync_service.rounds.config import RunConfig

    if not word.startswith("--"):
        return None
    option = word.partition("=")[0]
    of_spes = {flag_of(entry) for entry in fields(SpesConfig) if WITHOUT_FLAG not in entry.metadata}
    if option in {*_BEGIN_SPES, *of_spes}:
        return f"{option} {_OF_EXPERTS}"
    name = as_field(option)
    if name in _OF_THE_RUN:
        return f"{option} {_OF_THE_RUN[name]}"
    if name in {entry.name for entry in fields(RunConfig)}:
        return f"{option}, of a run at the server, {DECIDES_NOTHING}"
    return None
