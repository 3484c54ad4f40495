# SPDX-License-Identifier: Apache-2.0
"""The sync service as a feature of a Megatron run: the job is a peer."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_ext.errors import UserError
from megatron_ext.hooks import Feature, LoadContext, LogContext, ModelContext, SaveContext, StepContext, TrainContext
from megatron_ext.params import ParameterView
from megatron_ext.patching import Patch
from megatron_ext.seams import checkpoint as checkpoint_seam
from megatron_ext.seams import logging, samples, training
from megatron_ext.seams.arguments import add_config_group, say
from megatron_ext.seams.optimizer import InnerValues
from megatron_ext.spes.arguments import ownership_of
from megatron_ext.sync_service.arguments import SyncServiceConfig, argument_problems, interval_of, notices
from megatron_ext.sync_service.config import INTERVAL
from megatron_ext.sync_service.report import Report

if TYPE_CHECKING:
    from megatron_ext.sync_service.client import RoundOutcome, SyncClient
    from megatron_ext.sync_service.interval import Interval
    from megatron_ext.sync_service.job import Job
    from megatron_ext.sync_service.slices import Slices

__all__ = ["SyncServiceFeature", "agreed"]

_FORMAT = 2
_STATE = "sync_service"
_TIMER = "sync-service"
_LOSS = "lm loss"
"""What Megatron calls the loss of language models."""


@dataclass(kw_only=True)
class _Peer:
    """What a job that is a peer has beside Megatron's own."""

    client: SyncClient
    """Talks to the server together with the other ranks' clients."""

    slices: Slices
    """What this rank moves."""

    values: InnerValues
    """What that is made of."""

    interval: Interval
    """What there is since the round that the client went on from."""

    job: Job
    """The ranks."""

    loss: torch.Tensor | None = None
    """Sum of the losses of steps since that round, where this rank knows them."""

    losses: int = 0
    """Of how many steps; fewer than the interval's after a resume."""

    last: RoundOutcome | None = None
    """The last round, without its values; None before the first."""


class SyncServiceFeature(Feature):
    """Wires the client to Megatron's optimizer, loop, data, log and checkpoints."""

    name = "sync-service"

    def __init__(self) -> None:
        self._peer: _Peer | None = None
        self._saved: dict[str, Any] | None = None

    # Arguments.

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the group of a peer's options."""
        add_config_group(parser, SyncServiceConfig, "sync service (local SGD across jobs)")

    def enabled(self, args: Any) -> bool:
        """Return whether this job is a peer."""
        return args.sync_service is not None

    def validate(self, args: Any) -> list[str]:
        """Check the options by themselves, and against the support table."""
        return argument_problems(args, self.name)

    def adjust_arguments(self, args: Any) -> list[str]:
        """Say what was chosen."""
        return notices(args)

    def patches(self) -> Sequence[Patch]:
        """Return the seams that a peer uses."""
        return [
            *training.model_patches(),
            *training.loop_patches(),
            *samples.patches(),
            *logging.patches(),
            *checkpoint_seam.patches(),
        ]

    def data_part(self, args: Any) -> tuple[int, int]:
        """Return which part of the samples is this peer's."""
        return (0, 1) if self._peer is None else (self._peer.client.index, self._peer.client.peers)

    # The run.

    def on_model_built(self, context: ModelContext) -> None:
        """Become a member, and take the values from which this job goes on: before the data, which it cuts."""
        if context.args.skip_train or context.optimizer is None:
            return
        self._peer = peer = _join(context, None if self._saved is None else self._saved["index"])
        adopted = peer.client.start(peer.slices.read()) if self._saved is None else self._resume(peer, self._saved)
        if adopted is not None:
            peer.slices.write(adopted)
            peer.values.refresh(now=True)
        peer.client.rest()
        place = f"{peer.interval.steps} steps after round {peer.client.round}"
        say(f"sync service: part {peer.client.index} of {peer.client.peers} of the samples, {place}")

    def _resume(self, peer: _Peer, saved: dict[str, Any]) -> Any:
        adopted = peer.client.resume(saved["round"])
        if adopted is None:
            peer.interval.resume(saved["steps"], saved["seconds"])
        else:
            say(f"sync service: the others went on after round {saved['round']}; its interval is lost")
        return adopted

    def after_step(self, context: StepContext) -> None:
        """Count the step, and make a round at the end of an interval."""
        peer = self._require_peer()
        if not context.completed:
            return
        is_over = peer.interval.count_step()
        if _LOSS in context.losses:
            # Stays on the device until the interval ends.
            loss = context.losses[_LOSS].detach().float().reshape(())
            peer.loss, peer.losses = loss if peer.loss is None else peer.loss + loss, peer.losses + 1
        if not is_over:
            return
        from megatron.training import get_timers

        timer = get_timers()(_TIMER, log_level=1)
        timer.start()
        self._meet(peer)
        timer.stop()

    def _meet(self, peer: _Peer) -> None:
        outcome = peer.client.sync(peer.slices.read(frozen=False), _report(peer))
        peer.slices.write(outcome.values)
        peer.values.refresh()
        peer.client.rest()
        peer.interval.restart()
        peer.losses, peer.loss = 0, None
        peer.last = replace(outcome, values={})
        if not outcome.contributed:
            # It goes on from the others' weights; its moments would spoil them in the next step.
            peer.values.reset_broken_moments()
            say(f"sync service: round {outcome.number} went without this peer: {outcome.message or 'it came too late'}")
        for unit, reason in outcome.excluded.items():
            say(f"sync service: round {outcome.number} left this peer out of {unit}: {reason}")

    def on_train_end(self, context: TrainContext) -> None:
        """End the membership: nobody shall wait for this job any more."""
        peer = self._require_peer()
        steps = peer.interval.steps
        if steps:
            say(f"sync service: training ends {steps} steps after round {peer.client.round}, with its own weights")
        peer.client.leave()
        peer.client.close()
        self._peer = None

    def on_log(self, context: LogContext) -> None:
        """Report the last round."""
        peer = self._require_peer()
        context.timers.append(_TIMER)
        if context.printing:
            context.fields.append(("sync round", str(peer.client.round)))
            if peer.last is not None:
                if not peer.client.asynchronous:
                    context.fields.append(("peers", f"{len(peer.last.contributors)}/{peer.client.peers}"))
                context.fields.append(("sync MB up", f"{peer.last.sent / 1e6:.3f}"))
                context.fields.append(("down", f"{peer.last.received / 1e6:.3f}"))
        if context.writing:
            context.scalars["sync-service/round"] = peer.client.round
            if peer.last is not None:
                context.scalars["sync-service/contributors"] = len(peer.last.contributors)
                context.scalars["sync-service/bytes-up"] = peer.last.sent
                context.scalars["sync-service/bytes-down"] = peer.last.received

    # Checkpoints.

    def on_save(self, context: SaveContext) -> None:
        """Say in the checkpoint where this peer is in its run."""
        if context.loading or self._peer is None:
            return
        config = SyncServiceConfig.from_args(context.args)
        client = self._peer.client
        context.state[_STATE] = {
            "format": _FORMAT,
            "run": config.sync_service_run,
            "peer": config.sync_service_peer,
            "index": client.index,
            "round": client.round,
            "steps": self._peer.interval.steps,
            "seconds": self._peer.interval.seconds,
        }

    def on_load(self, context: LoadContext) -> None:
        """Take over where the peer was, unless the checkpoint is of another run or of weights alone."""
        if context.common_only:
            return
        saved, args = context.state.pop(_STATE, None), context.args
        self._saved = None
        if saved is None or args.no_load_optim or args.finetune:
            return
        if saved["format"] != _FORMAT:
            raise UserError(
                f"--load {context.directory}: the state of a sync service's peer of format {saved['format']}, this "
                f"version reads format {_FORMAT}; use the version of megatron_ext that saved it"
            )
        if saved["run"] != args.sync_service_run:
            say(
                f"sync service: a checkpoint of run {saved['run']!r}, whose weights begin run {args.sync_service_run!r}"
            )
            return
        if saved["peer"] != args.sync_service_peer:
            raise UserError(
                f"--load {context.directory}: it was saved by peer {saved['peer']!r}, and --sync-service-peer is "
                f"{args.sync_service_peer!r}; give every peer its own checkpoint, or start this one with "
                "--no-load-optim"
            )
        if args.sync_service_index not in (None, saved["index"]):
            raise UserError(
                f"--load {context.directory}: it was saved by the peer of index {saved['index']}, and "
                f"--sync-service-index is {args.sync_service_index}; drop the option, or start with --no-load-optim"
            )
        self._saved = saved

    def _require_peer(self) -> _Peer:
        assert self._peer is not None, "sync service: the model is not built yet"
        return self._peer


def _join(context: ModelContext, index: int | None) -> _Peer:
    """Return the peer that this job is, not yet a member; all ranks call it."""
    # Imported here because they import gRPC, which other runs can do without.
    from megatron_ext.sync_service.client import ClientConfig, SyncClient
    from megatron_ext.sync_service.connection import ConnectionConfig
    from megatron_ext.sync_service.interval import Interval
    from megatron_ext.sync_service.job import Ranks
    from megatron_ext.sync_service.slices import Slices, catalog_of

    config = SyncServiceConfig.from_args(context.args)
    # `problems` has seen to it.
    assert config.sync_service and config.sync_service_run and config.sync_service_peer
    view = ParameterView.from_model(context.model)
    values = InnerValues(context.optimizer, view)
    catalog = catalog_of(view, ownership_of(context.args))
    slices = Slices(values, catalog)
    longest = config.sync_service_round_seconds + 10 * config.sync_service_patience_seconds
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=math.ceil(longest)))
    client_config = ClientConfig(
        connection=ConnectionConfig(
            server=config.sync_service,
            token_file=config.sync_service_token_file,
            tls_ca=config.sync_service_tls_ca,
            tls_cert=config.sync_service_tls_cert,
            tls_key=config.sync_service_tls_key,
            insecure=config.sync_service_insecure,
            patience_seconds=config.sync_service_patience_seconds,
        ),
        run=config.sync_service_run,
        peer=config.sync_service_peer,
        index=config.sync_service_index if index is None else index,
        peers=config.sync_service_peers,
        codec=config.sync_service_codec,
        agreed=agreed(context.args),
        streams=config.sync_service_streams,
        round_seconds=config.sync_service_round_seconds,
    )
    job = Ranks(group)
    client = SyncClient(client_config, catalog, job=job, parts=slices.parts)
    interval = Interval(job, steps=config.sync_service_interval, seconds=config.sync_service_interval_seconds)
    return _Peer(client=client, slices=slices, values=values, interval=interval, job=job)


def _report(peer: _Peer) -> Report:
    """Return what there is to say of the interval; all ranks call it."""
    # Known on the last pipeline stage, and said by the first rank. After a resume it is that of the steps since.
    known = peer.job.on_all(lambda: None if peer.loss is None else (float(peer.loss), peer.losses))
    sums = [entry for entry in known if entry is not None]
    return Report(loss=sums[0][0] / sums[0][1] if sums else None, steps=peer.interval.steps)


def agreed(args: Any) -> dict[str, str]:
    """Return what the peers have to agree on beside the tensors: the interval, and the order of the samples."""
    samples = args.train_samples or args.train_iters * args.global_batch_size
    return {
        INTERVAL: interval_of(args),
        "--seed": str(args.seed),
        "--seq-length": str(args.seq_length),
        "--split": str(args.split),
        "--dataloader-type": str(args.dataloader_type),
        "--train-samples, or --train-iters times --global-batch-size": str(samples),
        "vocabulary with its padding (--make-vocab-size-divisible-by)": str(args.padded_vocab_size),
    }
