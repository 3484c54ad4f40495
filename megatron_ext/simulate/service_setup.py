# SPDX-License-Identifier: Apache-2.0
"""A simulated run at a sync service from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_ext.errors import combine
from megatron_ext.outer.codecs.all_codecs import build_codec
from megatron_ext.phrases import plural
from megatron_ext.simulate.job_run import SimulatedRun
from megatron_ext.simulate.service_run import ServiceLoad, ServiceRun
from megatron_ext.simulate.simulated_peers import SimulatedPeers, SimulatedServer
from megatron_ext.simulate.step_timer import StepTimer
from megatron_ext.simulate.training_work import SimulatedTraining
from megatron_ext.sync_service.megatron.arguments import SyncServiceConfig
from megatron_ext.sync_service.rounds.config import RunConfig

__all__ = ["ServiceSetup"]

_BYTES_PER_GBIT = 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class ServiceSetup:
    """Everything that decides how long a run of peers takes."""

    peers: SimulatedPeers
    """Who meets."""

    server: SimulatedServer
    """Where."""

    training: SimulatedTraining
    """What each trains."""

    units: Mapping[str, int]
    """Values of every unit of the model."""

    service: SyncServiceConfig
    """Interval, delay and codec, as a peer has them."""

    @property
    def run_config(self) -> RunConfig:
        """The run as the server's configuration would have it."""
        server, found = self.server, RunConfig(peers=self.peers.peers, rounds=self.server.rounds)
        if server.quorum:
            found = replace(found, quorum=server.quorum)
        if server.max_staleness >= 0:
            found = replace(found, max_staleness=server.max_staleness)
        return replace(found, grace_seconds=server.grace_seconds)

    def check(self) -> None:
        """Refuse what cannot be, or what server or peers would refuse.

        Raises:
            UserError: naming every setting.
        """
        found = self.peers.problems() + self.server.problems() + self.training.problems()
        found += self.service.problems()
        if not found:
            found += self.run_config.problems()
        if self.training.round_work:
            found.append("--round-work is of workers inside a job; drop it")
        interval = self.service.sync_service_interval
        if interval is not None and interval > self.training.steps:
            found.append(
                f"--sync-service-interval {interval} is longer than the run's {plural(self.training.steps, 'step')}, "
                "so that no round falls into it; lower it or raise --steps"
            )
        if found:
            raise combine(found, "simulate")

    @property
    def parameters(self) -> int:
        """Of the model."""
        return sum(self.units.values())

    @property
    def step_seconds(self) -> float:
        """Of a peer of average speed."""
        return self.training.seconds(self.parameters, self.peers.peer_gpus)

    def run(self) -> SimulatedRun:
        """Return what becomes of the run."""
        peers, service = self.peers, self.service
        codec = build_codec(service.sync_service_codec)
        results = codec.for_results(peers.peers)
        load = ServiceLoad(
            interval=service.sync_service_interval,
            interval_seconds=service.sync_service_interval_seconds or 0.0,
            delay=service.sync_service_delay,
            up=sum(codec.nbytes(values) for values in self.units.values()),
            down=sum(results.nbytes(values) for values in self.units.values()),
            reduction_seconds=4 * self.parameters / (1e6 * self.server.reduction),
            latency=1e-3 * peers.latency,
            peer_link=_BYTES_PER_GBIT * peers.bandwidth,
            server_link=_BYTES_PER_GBIT * self.server.server_bandwidth,
            mean_life=3600 * peers.mtbf_hours / peers.peer_gpus,
            restart_seconds=peers.restart_seconds,
            steps=peers.peers * self.training.steps,
        )
        timer = StepTimer(peers.speeds, self.step_seconds, each=True)
        found = ServiceRun(self.run_config.policy, load, timer, peers.seed).run()
        return replace(found, tokens=float(self.training.step_tokens) * found.worker_steps)
