# SPDX-License-Identifier: Apache-2.0
"""A SPES peer's options: from a file, from flags, and what they make of the sync service's own."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_ext.config_options import WITHOUT_FLAG, argument_of, flag_of, in_option_names
from megatron_ext.errors import UserError
from megatron_ext.options import asks_to_switch, refusals
from megatron_ext.spes.config import SpesConfig
from megatron_ext.spes.config_file import read_spes_config
from megatron_ext.spes.ownership import Ownership

__all__ = ["argument_problems", "complete_arguments", "frozen_problems", "names_of_arguments", "ownership_of"]

_SYNC_SERVICE = {
    "num_peers": "sync_service_peers",
    "peer_id": "sync_service_index",
    "sync_steps": "sync_service_interval",
}
"""Which argument of the sync service a key of `spes_config` stands for."""


_FLAGS = {entry.name: flag_of(entry) for entry in fields(SpesConfig) if not entry.metadata.get(WITHOUT_FLAG)}
"""What the keys of the file are called on the command line."""


def _said(args: Any, problem: str) -> str:
    """Return a problem in the words of who gave flags, or of who gave a file."""
    return problem if args.spes_config is not None else in_option_names(problem, (), _FLAGS)


def _read_file(path: str) -> SpesConfig:
    try:
        return read_spes_config(Path(path))
    except UserError as error:
        raise UserError(f"--spes-config {error}") from error


def names_of_arguments() -> dict[str, str]:
    """Return which key of the file stands for an argument that has a flag, by the argument's name."""
    return {argument_of(entry): entry.name for entry in fields(SpesConfig) if not entry.metadata.get(WITHOUT_FLAG)}


def complete_arguments(args: Any) -> None:
    """Fill in what `--spes-config FILE` says and the command line does not, and the names of run and peer.

    Args:
        args: Megatron's argument namespace; changed in place.

    Raises:
        UserError: the file cannot be used.
    """
    config = SpesConfig() if args.spes_config is None else _read_file(args.spes_config)
    for name, key in names_of_arguments().items():
        if getattr(args, name) is None:
            setattr(args, name, getattr(config, key))
    if not args.using_spes:
        return
    if args.sync_service is None:
        args.sync_service = config.server_addr
    if args.sync_service is None:
        # Said in `argument_problems`; what follows has no meaning without it.
        return
    for key, name in _SYNC_SERVICE.items():
        by_time = name == "sync_service_interval" and args.sync_service_interval_seconds is not None
        if getattr(args, name) is None and not by_time:
            setattr(args, name, getattr(config, key))
    if args.sync_service_run is None:
        args.sync_service_run = "spes"
    if args.sync_service_peer is None and args.sync_service_index is not None:
        args.sync_service_peer = f"node{args.sync_service_index}"


def ownership_of(args: Any) -> Ownership | None:
    """Return the owners of the experts; None without SPES.

    Args:
        args: Megatron's argument namespace, completed.

    Raises:
        UserError: the options cannot be used, or do not fit the model or the number of peers.
    """
    if not args.using_spes:
        return None
    return SpesConfig.from_args(args).ownership(args.sync_service_peers, args.num_experts)


def argument_problems(args: Any) -> list[str]:
    """Return the problems, one sentence each.

    Args:
        args: Megatron's argument namespace, completed.
    """
    config = SpesConfig.from_args(args)
    problems = [_said(args, problem) for problem in config.problems()]
    if not config.using_spes:
        if args.spes_config is not None:
            problems.append(f"--spes-config {args.spes_config} does not say using_spes: true; say it, or drop the file")
        return problems
    if args.sync_service is None:
        return [*problems, "--using-spes needs --sync-service HOST:PORT (server_addr), where the peers meet; add it"]
    if args.sync_service_index is None:
        problems.append("--using-spes needs --sync-service-index (peer_id), by which experts have owners; add it")
    if args.num_experts is None:
        problems.append("--using-spes needs a mixture of experts to share out; give --num-experts")
    if config.using_decayed_aux_loss:
        problems += refusals(args, "spes", "--spes-using-decayed-aux-loss")
    kinds = args.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if config.using_decayed_aux_loss and not any(kind.endswith("aux_loss") for kind in kinds):
        problems.append(
            f"--spes-using-decayed-aux-loss has no effect with --moe-router-load-balancing-type {' '.join(kinds)}; use "
            "aux_loss, or drop it"
        )
    if problems or args.sync_service_peers is None:
        return problems
    if not 0 <= args.sync_service_index < args.sync_service_peers:
        return []  # the sync service names it, and such a peer has no experts that anything could be wrong with
    try:
        ownership = ownership_of(args)
    except UserError as error:
        return [_said(args, str(error))]
    assert ownership is not None
    return frozen_problems(args, ownership)


def frozen_problems(args: Any, ownership: Ownership) -> list[str]:
    """Return the options that do not work for a peer that freezes experts, one sentence each.

    Args:
        args: Megatron's argument namespace, completed.
        ownership: of the run.
    """
    owned = set(ownership.owned_by(args.sync_service_index))
    if len(owned) == ownership.experts:
        return []
    problems = refusals(args, "spes", "frozen experts")
    ranks = args.expert_model_parallel_size
    each = ownership.experts // ranks
    idle = [rank for rank in range(ranks) if owned.isdisjoint(range(rank * each, (rank + 1) * each))]
    # Hot switching with such a rank at home has not been tested.
    if idle and asks_to_switch(args):
        problems.append(
            f"--expert-model-parallel-size {ranks}: expert-parallel rank {idle[0]} would have no expert of this peer's "
            "to train, which hot switching does not take; use --spes-expert-assignment interleaved, or fewer ranks"
        )
    return problems
