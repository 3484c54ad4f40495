# SPDX-License-Identifier: Apache-2.0
"""A measured setting, simulated with the figures that its run has shown."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.simulated.settings import LAYERS, Setting
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.simulate.fleet import SimulatedFleet
from megatron_ext.simulate.job_run import SimulatedRun
from megatron_ext.simulate.job_setup import JobSetup
from megatron_ext.simulate.model_units import equal_layers
from megatron_ext.simulate.service_setup import ServiceSetup
from megatron_ext.simulate.simulated_peers import SimulatedPeers, SimulatedServer
from megatron_ext.simulate.training_work import SimulatedTraining
from megatron_ext.sync_service.megatron.arguments import SyncServiceConfig
from megatron_ext.sync_service.rounds.journal import read_whole_journal

__all__ = ["Link", "reduction_of", "simulated"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a plain stream shows of it."""

    bytes_per_second: float
    """Of one stream."""

    exchange: float
    """Bytes per second of a worker when all send what a way of a round does, to all and in as many pieces; or what a
    synchronous step does, to the next one."""

    latency: float
    """Seconds of a message."""


def simulated(setting: Setting, link: Link, told: list[dict[str, Any]], values: int, reduction: float | None) -> float:
    """Return the simulated utilisation of the intervals that were measured.

    Args:
        setting: what was measured.
        link: between the workers.
        told: by every worker.
        values: of the model.
        reduction: MB/s of the server; None without one.
    """
    steps = [step for worker in told for step in worker["steps"]]
    mean = statistics.fmean(steps)
    # Peers share the server's link, workers have links with each other.
    bandwidth = link.exchange if reduction is None else link.bytes_per_second
    parts = {
        "bandwidth": 8 * bandwidth / 1e9,
        "latency": 1e3 * link.latency,
        "jitter": statistics.pstdev(steps) / mean,
    }

    def run(count: int) -> SimulatedRun:
        training = SimulatedTraining(
            steps=count * setting.interval, step_seconds=mean, round_work=told[0].get("work", 0.0)
        )
        units = equal_layers(values, LAYERS)
        if reduction is not None:
            service = ServiceSetup(
                peers=SimulatedPeers(peers=len(told), **parts),
                server=SimulatedServer(server_bandwidth=parts["bandwidth"], reduction=reduction),
                training=training,
                units=units,
                service=SyncServiceConfig(
                    sync_service="localhost:50051",
                    sync_service_run="simulated",
                    sync_service_peer="peer",
                    sync_service_peers=len(told),
                    sync_service_interval=setting.interval,
                    sync_service_codec=setting.codec or "fp32",
                ),
            )
            service.check()
            return service.run()
        job = JobSetup(
            fleet=SimulatedFleet(workers=len(told), **parts),
            training=training,
            units=units,
            local_sgd=LocalSGDConfig(
                use_local_sgd=True,
                local_sgd_workers=len(told),
                local_sgd_sync_interval=setting.interval,
                codec=setting.codec,
            ),
            streaming=StreamingConfig(
                fragments=setting.fragments, sync_delay=setting.delay, update_alpha=0.5 if setting.delay else 0.0
            ),
        )
        job.check()
        return job.baseline() if setting.kind == "synchronous" else job.run()

    # What was measured begins after the first interval.
    before, after = run(1), run(1 + setting.intervals)
    return (after.time["training"] - before.time["training"]) / (after.seconds - before.seconds)


def reduction_of(journal: Path, values: int, peers: int) -> float:
    """Return MB/s of fp32 values that a server has reduced in the measured rounds of a run."""
    rounds = [event for event in read_whole_journal(journal).events if event["event"] == "committed"]
    seconds = statistics.fmean(event["seconds"] for event in rounds[2:])
    return 4 * values * peers / 1e6 / max(seconds, 1e-3)
