# SPDX-License-Identifier: Apache-2.0
"""A simulated run at a sync service from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_ext.config_options import in_option_names
from megatron_ext.errors import combine
from megatron_ext.outer.codecs.all_codecs import build_codec
from megatron_ext.phrases import plural
from megatron_ext.simulate.event_limits import longer_than_run, too_many
from megatron_ext.simulate.job_run import SimulatedRun
from megatron_ext.simulate.service_run import ServiceLoad, ServiceRun, more_that_count
from megatron_ext.simulate.simulated_peers import SimulatedPeers, SimulatedServer
from megatron_ext.simulate.step_timer import StepTimer
from megatron_ext.simulate.training_work import SimulatedTraining
from megatron_ext.sync_service.megatron.arguments import SyncServiceConfig
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.durations import ALIVE_HEARTBEATS
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.rounds.presence import silence
from megatron_ext.sync_service.shards.sharding import assign, part_of

__all__ = ["ServiceSetup"]

_BYTES_PER_GBIT = 1e9 / 8

_MESSAGES_OF_ROUND = 4
"""That the first of several servers and another one exchange: to measure contributions, and to make values of them."""

_OF_THE_RUN = ("rounds", "quorum", "grace_seconds", "max_staleness")
"""Fields of a run at the server that are options of the simulation."""


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
        return RunConfig(peers=self.peers.peers, **{name: getattr(self.server, name) for name in _OF_THE_RUN})

    def check(self) -> None:
        """Refuse what cannot be, or what server or peers would refuse.

        Raises:
            UserError: naming every setting.
        """
        found = (
            self._field_problems()
            or [in_option_names(problem, ("peers", *_OF_THE_RUN)) for problem in self.run_config.problems()]
            or self.training.model_problems(self.parameters, self.peers.peer_gpus)
            or self._shard_problems()
            or self._schedule_problems()
            or self._too_long()
        )
        if found:
            raise combine(found, "simulate")

    def _field_problems(self) -> list[str]:
        """Return what cannot be, whatever the others are."""
        of_a_peer = [problem.replace("--sync-service-peers", "--peers") for problem in self.service.problems()]
        found = self.peers.problems() + self.server.problems() + self.training.problems() + of_a_peer
        return found or (["--round-work is of workers inside a job; drop it"] if self.training.round_work else [])

    def _shard_problems(self) -> list[str]:
        """Return why the values cannot be divided among the servers."""
        try:
            self._largest_part()
        except Refusal as refusal:
            return [f"--shards is {self.server.shards}: {refusal}"]
        return []

    def _largest_part(self) -> float:
        """Which part of the values the server has that has most.

        Raises:
            Refusal: there is not something for each.
        """
        if self.server.shards == 1:
            return 1.0
        catalog = Catalog(TensorSpec(name=unit, shape=(values,), unit=unit) for unit, values in self.units.items())
        shards = self.server.shards
        shard_of = assign(catalog, shards)
        return max(part_of(catalog, shard_of, shard).nbytes for shard in range(shards)) / catalog.nbytes

    def _schedule_problems(self) -> list[str]:
        """Return what does not fit into the run."""
        interval = self.service.sync_service_interval
        if interval is not None and interval > self.training.steps:
            return [
                f"--sync-service-interval {interval} is longer than the run's {plural(self.training.steps, 'step')}, "
                "so that no round falls into it; lower it or raise --steps"
            ]
        seconds = self.service.sync_service_interval_seconds
        if seconds is not None:
            found = longer_than_run("--sync-service-interval-seconds", seconds, self._seconds)
            if found:
                return found
        return self.server.problems_among(self.peers.peers)

    def _too_long(self) -> list[str]:
        """Return why the simulation would not end in minutes."""
        service, peers, steps = self.service, self.peers.peers, self.training.steps
        if service.sync_service_interval is not None:
            option = f"--sync-service-interval {service.sync_service_interval}"
            return too_many(option, peers * (steps // service.sync_service_interval), "contributions")
        seconds = service.sync_service_interval_seconds
        assert seconds is not None, "an interval is of steps or of seconds"
        option, each = f"--sync-service-interval-seconds {seconds:g}", min(self._seconds / seconds, steps)
        return too_many(option, peers * each, "contributions")

    @property
    def _seconds(self) -> float:
        """Of the training of the whole run."""
        return self._timer.run_seconds(self.training.steps)

    @property
    def _timer(self) -> StepTimer:
        return StepTimer(self.peers.speeds, self.step_seconds, each=True)

    @property
    def parameters(self) -> int:
        """Of the model."""
        return sum(self.units.values())

    @property
    def step_seconds(self) -> float:
        """Of a peer of average speed."""
        return self.training.seconds(self.parameters, self.peers.peer_gpus)

    def advice(self, found: SimulatedRun) -> list[str]:
        """Return what to know of a run: that it makes more steps than were asked for, what most contributions lack."""
        said = []
        steps, interval = self.training.steps, self.service.sync_service_interval
        if interval is not None and steps % interval:
            whole = -(-steps // interval)
            said.append(
                f"{steps} steps are not whole intervals of {interval}: the run ends with round {whole}, after "
                f"{whole * interval} steps of a peer that loses none"
            )
        if found.too_late is not None and found.too_late > 0.5:
            said.append(
                f"{found.too_late:.0%} of the contributions come too late to count, and what their peers trained is "
                f"lost: give {more_that_count(self.run_config.policy)}"
            )
        return said

    def run(self) -> SimulatedRun:
        """Return what becomes of the run."""
        peers, service, part = self.peers, self.service, self._largest_part()
        codec = build_codec(service.sync_service_codec)
        results = codec.for_results(peers.peers)
        load = ServiceLoad(
            interval=service.sync_service_interval,
            interval_seconds=service.sync_service_interval_seconds or 0.0,
            delay=service.sync_service_delay,
            up=sum(codec.nbytes(values) for values in self.units.values()),
            down=sum(results.nbytes(values) for values in self.units.values()),
            reduction_seconds=part * 4 * self.parameters / (1e6 * self.server.reduction),
            messages=_MESSAGES_OF_ROUND if self.server.shards > 1 else 0,
            latency=1e-3 * peers.latency,
            peer_link=_BYTES_PER_GBIT * peers.bandwidth,
            # Contributions are done when their largest part is.
            server_link=_BYTES_PER_GBIT * self.server.server_bandwidth / part,
            mean_life=3600 * peers.mtbf_hours / peers.peer_gpus,
            restart_seconds=peers.restart_seconds,
            silence=silence(ALIVE_HEARTBEATS * service.sync_service_heartbeat_seconds),
            kept=self.server.keep_snapshots,
            steps=peers.peers * self.training.steps,
        )
        found = ServiceRun(self.run_config.policy, load, self._timer, peers.seed).run()
        return replace(found, tokens=float(self.training.step_tokens) * found.worker_steps)
