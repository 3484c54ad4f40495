# SPDX-License-Identifier: Apache-2.0
"""The workers of a simulated job: how many, what lies between them, how fast they are, how often they fail."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_ext.simulate.number_rules import BANDWIDTH, LATENCY, SECONDS, SEED, NumberRule, number_problems

__all__ = ["GPUS", "JITTER", "MTBF_HOURS", "NO_RESTART", "SLOW_FACTOR", "SPEED_SPREAD", "SimulatedFleet"]

NO_RESTART = "--restart-seconds has no effect without --mtbf-hours; give it or drop this"
"""What is said where nothing fails."""

GPUS = NumberRule(least=1, most=1_000_000)
"""Of a worker or peer."""

SLOW_FACTOR = NumberRule(least=1, most=1000)
"""By which some are slower."""

SPEED_SPREAD = NumberRule(least=1e-6, most=1, or_zero=True)
"""Of lasting speeds."""

JITTER = NumberRule(least=1e-6, most=3, or_zero=True)
"""Of steps. At 3 nearly all of the time is in one step of ten."""

MTBF_HOURS = NumberRule(least=1e-6, most=1e9, or_zero=True)
"""Of a GPU."""

_WORKERS = NumberRule(least=1, most=100_000)
"""Of a job. The slowest of all of them is drawn for some dozens of steps at once."""


@dataclass(frozen=True, kw_only=True)
class SimulatedFleet:
    """Workers, links, speeds and failures."""

    workers: int = 0
    """Groups of GPUs that train apart, or together in synchronous training."""

    worker_gpus: int = 1
    """GPUs of a worker; they count for failures and for --tflops"""

    bandwidth: float = 0.0
    """Gbit/s from one worker to the others, all of its links together"""

    latency: float = 0.1
    """Of a message, in ms"""

    sites: int = 1
    """Places over which the workers are spread evenly"""

    site_bandwidth: float = 0.0
    """Gbit/s between one site and the others, each way, for all of its workers together"""

    site_latency: float = 0.0
    """Of a message between sites, in ms"""

    overlap: float = 0.0
    """Part of a step during which synchronous training's gradients travel while it computes, 0 to 1; two thirds is the
    whole backward pass"""

    slow_workers: int = 0
    """How many are slower than the others by --slow-factor"""

    slow_factor: float = 1.0
    """How many times as long a slow worker's step takes"""

    speed_spread: float = 0.0
    """Standard deviation of the workers' lasting speeds, as a part of the mean"""

    jitter: float = 0.0
    """Standard deviation of a step's time from one step to the next, as a part of the mean"""

    mtbf_hours: float = 0.0
    """Mean time between failures of one GPU, in hours; 0 for none. A failure ends the job, which restarts from its last
    checkpoint"""

    restart_seconds: float = 300.0
    """From a failure until the job trains again"""

    save_interval: int = 0
    """Steps between two checkpoints; 0 for none. With rounds by time they are counted in rounds"""

    save_seconds: float = 0.0
    """During which training waits for a checkpoint"""

    seed: int = 0
    """Of speeds, jitter and failures"""

    def problems(self) -> list[str]:
        """Return what cannot be, one sentence each."""
        rules = {
            "workers": _WORKERS,
            "worker_gpus": GPUS,
            "bandwidth": BANDWIDTH,
            "latency": LATENCY,
            "sites": NumberRule(least=1, most=max(self.workers, 1), of_most="--workers"),
            "site_bandwidth": replace(BANDWIDTH, or_zero=True),
            "site_latency": LATENCY,
            "overlap": NumberRule(least=0, most=1),
            "slow_workers": NumberRule(least=0, most=max(self.workers, 1), of_most="--workers"),
            "slow_factor": SLOW_FACTOR,
            "speed_spread": SPEED_SPREAD,
            "jitter": JITTER,
            "mtbf_hours": MTBF_HOURS,
            "restart_seconds": SECONDS,
            "save_interval": NumberRule(least=0),
            "save_seconds": SECONDS,
            "seed": SEED,
        }
        return number_problems(self, rules) or self._contradictions()

    def _contradictions(self) -> list[str]:
        together = {
            "--sites above 1 needs --site-bandwidth; give it": self.sites > 1 and not self.site_bandwidth,
            "--site-bandwidth has no effect with one site; give --sites or drop it": (
                self.sites == 1 and self.site_bandwidth > 0
            ),
            "--site-latency has no effect with one site; give --sites or drop it": (
                self.sites == 1 and self.site_latency > 0
            ),
            f"--sites {self.sites} does not divide --workers {self.workers}; sites have equally many": (
                self.workers % self.sites != 0
            ),
            "--slow-workers and --slow-factor need each other; give both or neither": (
                (self.slow_workers > 0) != (self.slow_factor > 1)
            ),
            "--mtbf-hours needs --save-interval, after whose checkpoint a job restarts; give it": (
                self.mtbf_hours > 0 and not self.save_interval
            ),
            NO_RESTART: self.restart_seconds != type(self).restart_seconds and not self.mtbf_hours,
            "--save-seconds has no effect without --save-interval; give it or drop this": (
                self.save_seconds > 0 and not self.save_interval
            ),
            f"--site-latency {self.site_latency:g} is below --latency {self.latency:g}, which every message has; raise "
            "it or drop it": self.sites > 1 and 0 < self.site_latency < self.latency,
        }
        return [problem for problem, holds in together.items() if holds]
