# SPDX-License-Identifier: Apache-2.0
"""What a Megatron job that is a peer has beside Megatron's own, and how it becomes one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_ext.errors import UserError
from megatron_ext.hooks import ModelBuilt
from megatron_ext.params import ParameterView
from megatron_ext.seams.optimizer import InnerValues
from megatron_ext.spes.arguments import ownership_of
from megatron_ext.sync_service.megatron.arguments import SyncServiceConfig, connection_of
from megatron_ext.sync_service.megatron.catching_up import progress_after_step
from megatron_ext.sync_service.megatron.data_digest import data_digest
from megatron_ext.sync_service.megatron.job_agreement import agreed
from megatron_ext.sync_service.peer.background import ThreadedRound
from megatron_ext.sync_service.peer.parts import Values
from megatron_ext.sync_service.protocol.report import Report
from megatron_ext.worker_groups import WorkerGroups

if TYPE_CHECKING:
    from megatron_ext.sync_service.megatron.workers import PeerValues
    from megatron_ext.sync_service.peer.client import RoundOutcome, SyncClient
    from megatron_ext.sync_service.peer.interval import Interval
    from megatron_ext.sync_service.peer.job import Job

__all__ = ["Peer", "join"]

_TRANSFER_SECONDS = 86400
"""Longer than any round's values travel while the link still brings some."""


@dataclass(kw_only=True)
class Peer:
    """What a job that is a peer has beside Megatron's own."""

    client: SyncClient
    """Talks to the server together with the other ranks' clients."""

    slices: PeerValues
    """What this rank moves, and its way to the workers inside the job."""

    context: ModelBuilt
    """Model, scheduler and arguments."""

    values: InnerValues
    """What that is made of."""

    interval: Interval
    """What there is since the round that the client continued from."""

    job: Job
    """The ranks."""

    delay: int
    """How many steps after the end of an interval its round is applied."""

    in_flight: ThreadedRound | None = None
    """A round that is not applied yet, which has the client and the job for itself."""

    round: int = -1
    """The last one that was applied."""

    waited: float = 0.0
    """Seconds that training stood still for a delayed one."""

    loss: torch.Tensor | None = None
    """Sum of the losses of steps since that round, where this rank knows them."""

    losses: int = 0
    """Of how many steps; fewer than the interval's after a resume."""

    last: RoundOutcome | None = None
    """The last round, without its values; None before the first."""

    memory: Values | None = None
    """What the last round's values were in, for the next one's; None before the first."""

    def begin_interval(self) -> None:
        """Count steps and losses from zero."""
        self.interval.restart()
        self.losses, self.loss = 0, None

    def count_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a step, which stays on its device until the interval ends."""
        value = loss.detach().float().reshape(())
        self.loss, self.losses = value if self.loss is None else self.loss + value, self.losses + 1

    def report(self) -> Callable[[], Report]:
        """Return what tells of the interval that this step ends; all ranks call it, in the thread that has the job."""
        known = None if self.loss is None else (float(self.loss), self.losses)
        steps, progress = self.interval.steps, progress_after_step(self.context)

        def tell() -> Report:
            # Known on the last pipeline stage of every worker, and said by the first rank. After a resume it is of the
            # steps since.
            means = [entry[0] / entry[1] for entry in self.job.on_all(lambda: known) if entry is not None]
            return Report(loss=sum(means) / len(means) if means else None, steps=steps, progress=progress)

        return tell


def join(context: ModelBuilt, index: int | None, groups: WorkerGroups | None) -> Peer:
    """Return the peer that this job is, not yet a member; all ranks call it."""
    # Imported here because they import gRPC, which other runs can do without.
    from megatron_ext.sync_service.megatron.slices import Slices, catalog_of
    from megatron_ext.sync_service.megatron.workers import PeerValues
    from megatron_ext.sync_service.peer.client import ClientConfig, SyncClient
    from megatron_ext.sync_service.peer.interval import Interval
    from megatron_ext.sync_service.peer.job import Ranks

    config = SyncServiceConfig.from_args(context.args)
    # `problems` has seen to it.
    assert config.sync_service and config.sync_service_run and config.sync_service_peer
    assert config.sync_service_peers
    view = ParameterView.from_model(context.model)
    values = InnerValues(context.optimizer, view)
    catalog = catalog_of(view, config.sync_service_peers, ownership_of(context.args))
    slices = PeerValues(Slices(values, catalog), groups)
    # Ranks wait here for the one whose values take longest to travel, which no limit but the link's is to end.
    longest = _TRANSFER_SECONDS + config.sync_service_round_seconds + 10 * config.sync_service_patience_seconds
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=math.ceil(longest)))
    job = Ranks(group)
    client_config = ClientConfig(
        connection=connection_of(config),
        run=config.sync_service_run,
        peer=config.sync_service_peer,
        index=config.sync_service_index if index is None else index,
        peers=config.sync_service_peers,
        codec=config.sync_service_codec,
        agreed=agreed(context.args),
        streams=config.sync_service_streams,
        round_seconds=config.sync_service_round_seconds,
        heartbeat_seconds=config.sync_service_heartbeat_seconds,
        take_over=config.sync_service_take_over,
        data=job.on_first(partial(data_digest, context.args)),
        continue_run=config.sync_service_continue_run,
    )
    job.on_all(partial(_refuse_frozen, view, context.args))
    client = SyncClient(client_config, catalog, job=job, parts=slices.parts)
    interval = Interval(job, steps=config.sync_service_interval, seconds=config.sync_service_interval_seconds)
    return Peer(
        client=client,
        slices=slices,
        context=context,
        values=values,
        interval=interval,
        job=job,
        delay=config.sync_service_delay,
    )


def _refuse_frozen(view: ParameterView, args: Any) -> None:
    """Refuse parameters that nobody trains.

    Raises:
        UserError: there are some beside the experts that are other peers'.
    """
    ownership, index = ownership_of(args), args.sync_service_index
    frozen = [
        entry.tensor.name
        for entry in view.entries
        if not entry.parameter.requires_grad
        and (ownership is None or ownership.is_trained(entry.tensor.name, index))
    ]
    if frozen:
        others = f" and {len(frozen) - 1} other parameters of this rank are" if len(frozen) > 1 else " is"
        raise UserError(
            f"--sync-service: {frozen[0]}{others} frozen (requires_grad is False) by the model's own code, and a round "
            "takes every parameter but other peers' experts from those who train it; let the model train them"
        )
