# SPDX-License-Identifier: Apache-2.0
"""Where a peer is in its run, in Megatron's checkpoints: the round, the interval, and a lossy codec's residuals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.errors import UserError
from megatron_ext.hooks import LoadContext, RankFiles, SaveContext
from megatron_ext.legacy_format.rank_file import read_rank_file, write_rank_file
from megatron_ext.seams.arguments import say
from megatron_ext.sync_service.megatron.arguments import SyncServiceConfig
from megatron_ext.sync_service.megatron.step_size import samples_of_step
from megatron_ext.sync_service.peer.parts import Part

__all__ = [
    "Begun",
    "Place",
    "assemble",
    "begun",
    "check_residuals",
    "parts_of_samples",
    "request",
    "samples_notice",
    "take_residuals",
    "take_state",
]

_FORMAT = 6
_STATE = "sync_service"
_RESIDUALS = "sync_service_residuals"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a peer is in its run."""

    index: int
    """Its part of the samples."""

    number: int
    """The round that it continued from."""

    digest: str
    """Of that round's values."""

    steps: int
    """Completed since."""

    seconds: float
    """Gone since."""

    residuals: dict[str, torch.Tensor]
    """What this rank's contributions have lost so far, 1-D by part."""

    @classmethod
    def of(cls, saved: Mapping[str, Any], residuals: dict[str, torch.Tensor]) -> Place:
        """Return the place that was put into a checkpoint."""
        return cls(
            index=saved["index"],
            number=saved["round"],
            digest=saved["digest"],
            steps=saved["steps"],
            seconds=saved["seconds"],
            residuals=residuals,
        )


@dataclass(frozen=True, kw_only=True)
class Begun:
    """Where the interval began in which a checkpoint was saved."""

    index: int
    """Of the peer that saved it."""

    number: int
    """The round that it began with."""

    digest: str
    """Of that round's values."""

    steps: int
    """Completed since, which are lost where a peer takes over other values."""

    batch: int
    """Samples of a step."""


def assemble(context: SaveContext, place: Place) -> None:
    """Put a peer's state into a checkpoint; all ranks call it."""
    config = SyncServiceConfig.from_args(context.args)
    is_lossy = config.sync_service_codec != "fp32"
    context.state[_STATE] = {
        "format": _FORMAT,
        "run": config.sync_service_run,
        "peer": config.sync_service_peer,
        "index": place.index,
        "peers": config.sync_service_peers,
        "round": place.number,
        "digest": place.digest,
        "steps": place.steps,
        "seconds": place.seconds,
        "codec": config.sync_service_codec,
        "residuals_of": _layout(context.args) if is_lossy else None,
    }
    if is_lossy and context.files is not None:
        write_rank_file(place.residuals, _file_of_this_rank(context.files))
    elif is_lossy:
        context.state[_RESIDUALS] = _of_this_rank(place.residuals)


def request(context: SaveContext, state: dict[str, Any] | None) -> None:
    """Ask for this rank's residuals, where the checkpoint that `state` is of has some."""
    if state is None or state["residuals_of"] is None or context.optimizer is None:
        return
    if context.files is None:
        context.state[_RESIDUALS] = _of_this_rank(None)
        return
    path = _file_of_this_rank(context.files)
    context.state[_RESIDUALS] = read_rank_file(path, "this rank's residuals of the codec", "start with --no-load-optim")


def parts_of_samples(context: LoadContext) -> int | None:
    """Return among how many peers the samples were cut that a checkpoint has counted, if not among this run's.

    Asked before the peer's state is taken out. 1 when no peer saved it; None when a peer of this run did, with as many
    others as now, or one that did not say.
    """
    saved = context.state.get(_STATE)
    if saved is None:
        return 1
    return None if _is_of_this_run(saved, context.args) else saved.get("peers")


def samples_notice(context: LoadContext) -> str | None:
    """Return what a job that is not a peer should know of a peer's checkpoint that it reads; None if nothing."""
    saved = context.state.get(_STATE)
    if saved is None or context.args.finetune or (saved.get("peers") or 1) == 1:
        return None
    return (
        f"sync service: --load {context.directory} was saved by peer {saved['peer']!r}, part {saved['index']} of "
        f"{saved['peers']} of run {saved['run']!r}, and has counted the samples of its part alone; this job has no "
        "part, and reads some of all peers' samples again"
    )


def begun(context: LoadContext) -> Begun | None:
    """Return where the interval of a checkpoint of this run began, be it for weights alone; None if it has none.

    Asked before the peer's state is taken out.
    """
    saved, args = context.state.get(_STATE), context.args
    if saved is None or args.finetune or not _is_of_this_run(saved, args) or saved["format"] != _FORMAT:
        return None
    return Begun(
        index=saved["index"],
        number=saved["round"],
        digest=saved["digest"],
        steps=saved["steps"],
        batch=samples_of_step(context.state["args"]),
    )


def take_state(context: LoadContext) -> dict[str, Any] | None:
    """Take a peer's state out of what was read; None when the checkpoint is of another run, or of weights alone.

    Raises:
        UserError: it is another peer's, or its residuals cannot be taken over.
    """
    saved, args = context.state.pop(_STATE, None), context.args
    if saved is None or args.no_load_optim or args.finetune:
        return None
    where = f"--load {context.directory}"
    if not _is_of_this_run(saved, args):
        former = f"{saved['run']!r} of {saved.get('peers', 'some')} peers"
        this = f"{args.sync_service_run!r} of {args.sync_service_peers}"
        say(f"sync service: a checkpoint of run {former}, whose weights begin run {this}")
        return None
    if saved["format"] != _FORMAT:
        raise UserError(
            f"{where}: the state of a sync service's peer of format {saved['format']}, this version reads format "
            f"{_FORMAT}; use the version of megatron_ext that saved it, or start with --no-load-optim"
        )
    if saved["peer"] != args.sync_service_peer:
        raise UserError(
            f"{where}: it was saved by peer {saved['peer']!r}, and --sync-service-peer is {args.sync_service_peer!r}; "
            "give every peer its own checkpoint, or start this one without --load: it takes the newest round's values"
        )
    if args.sync_service_index not in (None, saved["index"]):
        raise UserError(
            f"{where}: it was saved by the peer of index {saved['index']}, and --sync-service-index is "
            f"{args.sync_service_index}; drop the option, or start with --no-load-optim"
        )
    if saved["codec"] != args.sync_service_codec:
        raise UserError(
            f"{where}: it was saved with --sync-service-codec {saved['codec']}, now it is {args.sync_service_codec}; "
            f"give --sync-service-codec {saved['codec']}, or start with --no-load-optim"
        )
    if saved["residuals_of"] not in (None, _layout(args)):
        raise UserError(
            f"{where}: the residuals of its codec were saved by {saved['residuals_of']}, this run has "
            f"{_layout(args)}; give that layout, or start with --no-load-optim"
        )
    then, now = samples_of_step(context.state["args"]), samples_of_step(args)
    if then != now:
        raise UserError(
            f"{where}: it was saved with --global-batch-size {then}, now it is {now}, and its "
            f"iterations are counted in batches; give --global-batch-size {then}, or start with --no-load-optim"
        )
    taken: dict[str, Any] = saved
    return taken


def take_residuals(context: LoadContext) -> dict[str, torch.Tensor]:
    """Take this rank's residuals out of what was read, empty where there are none."""
    residuals: dict[str, torch.Tensor] = context.state.pop(_RESIDUALS, None) or {}
    return residuals


def check_residuals(residuals: Mapping[str, torch.Tensor], parts: Iterable[Part]) -> None:
    """Check that the residuals are those of parts of this rank.

    Raises:
        UserError: one is of a rank that held something else.
    """
    sizes = {part.key: part.box.numel for part in parts if part.is_primary}
    for key, residual in residuals.items():
        if sizes.get(key) != residual.numel():
            raise UserError(
                f"--load: the codec's residual of {key} is not this rank's in this run; give the "
                "parallel options of the run that saved it, or start with --no-load-optim"
            )


def _is_of_this_run(saved: Mapping[str, Any], args: Any) -> bool:
    # A run of the same name may be another one, at a server that does not know the first.
    peers = saved.get("peers", args.sync_service_peers)
    return (saved["run"], peers) == (args.sync_service_run, args.sync_service_peers)


def _of_this_rank(residuals: dict[str, torch.Tensor] | None) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return ShardedObject(_RESIDUALS, residuals, (dist.get_world_size(),), (dist.get_rank(),))


def _file_of_this_rank(files: RankFiles) -> Path:
    return files.base / f"sync_service_residuals_{dist.get_rank():05d}.pt"


def _layout(args: Any) -> str:
    """Return in words what decides which rank holds what."""
    return (
        f"{args.world_size} ranks, TP {args.tensor_model_parallel_size}, PP {args.pipeline_model_parallel_size}, "
        f"EP {args.expert_model_parallel_size}, {'a' if args.use_distributed_optimizer else 'no'} distributed optimizer"
    )
