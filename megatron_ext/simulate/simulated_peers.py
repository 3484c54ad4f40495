# SPDX-License-Identifier: Apache-2.0
"""The peers of a simulated sync service: how many, how fast, how joined to the server, how often they fail."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.simulate.fleet import GPUS, JITTER, MTBF_HOURS, NO_RESTART, SLOW_FACTOR, SPEED_SPREAD, SimulatedFleet
from megatron_ext.simulate.number_rules import BANDWIDTH, LATENCY, SECONDS, SEED, NumberRule, number_problems

__all__ = ["SimulatedPeers", "SimulatedServer"]


@dataclass(frozen=True, kw_only=True)
class SimulatedPeers:
    """Peers, their speeds, links and failures."""

    peers: int = 0
    """Jobs that meet at the server"""

    peer_gpus: int = 1
    """GPUs of a peer; they count for failures and for --tflops"""

    bandwidth: float = 0.0
    """Gbit/s of a peer's own link, each way"""

    latency: float = 0.1
    """Of a message, in ms"""

    slow_peers: int = 0
    """How many are slower than the others by --slow-factor"""

    slow_factor: float = 1.0
    """How many times as long a slow peer's step takes"""

    speed_spread: float = 0.0
    """Standard deviation of the peers' lasting speeds, as a part of the mean"""

    jitter: float = 0.0
    """Standard deviation of a step's time from one step to the next, as a part of the mean"""

    mtbf_hours: float = 0.0
    """Mean time between failures of one GPU, in hours; 0 for none. A failure ends its peer alone, which restarts where
    its interval began"""

    restart_seconds: float = 300.0
    """From a failure until the peer asks the server where to resume"""

    seed: int = 0
    """Of speeds, jitter and failures"""

    def problems(self) -> list[str]:
        """Return what cannot be, one sentence each."""
        rules = {
            "peers": NumberRule(least=1),  # how many at most is for the run to say
            "peer_gpus": GPUS,
            "bandwidth": BANDWIDTH,
            "latency": LATENCY,
            "slow_peers": NumberRule(least=0, most=max(self.peers, 1), of_most="--peers"),
            "slow_factor": SLOW_FACTOR,
            "speed_spread": SPEED_SPREAD,
            "jitter": JITTER,
            "mtbf_hours": MTBF_HOURS,
            "restart_seconds": SECONDS,
            "seed": SEED,
        }
        found = number_problems(self, rules)
        if not found and (self.slow_peers > 0) != (self.slow_factor > 1):
            found.append("--slow-peers and --slow-factor need each other; give both or neither")
        if not found and self.restart_seconds != type(self).restart_seconds and not self.mtbf_hours:
            found.append(NO_RESTART)
        return found

    @property
    def speeds(self) -> SimulatedFleet:
        """Their speeds, as those of workers."""
        return SimulatedFleet(
            workers=self.peers,
            slow_workers=self.slow_peers,
            slow_factor=self.slow_factor,
            speed_spread=self.speed_spread,
            jitter=self.jitter,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class SimulatedServer:
    """The server: its link, how fast it reduces, and when its rounds close, as in its configuration."""

    server_bandwidth: float = 0.0
    """Gbit/s of the server's link, each way, for all peers together"""

    reduction: float = 0.0
    """MB/s of fp32 values, of all contributions together, that the server reduces and writes: to be measured, from the
    'seconds' of rounds in its history"""

    shards: int = 1
    """Servers that have a part of the values each, and such a link and such a speed each"""

    keep_snapshots: int = 2
    """As the server's field of that name: a peer that has failed resumes its interval if the values that it began with
    are among these rounds'"""

    rounds: str = "synchronous"
    """'synchronous' or 'asynchronous', as the run's field of that name"""

    quorum: int | None = None
    """As the run's field of that name; all peers unless given"""

    grace_seconds: float = 60.0
    """As the run's field of that name"""

    max_staleness: int | None = None
    """As the run's field of that name; no limit unless given"""

    def problems(self) -> list[str]:
        """Return what cannot be and is not the run's own to check, one sentence each."""
        rules = {"server_bandwidth": BANDWIDTH, "reduction": BANDWIDTH}
        rules |= dict.fromkeys(("shards", "keep_snapshots"), NumberRule(least=1))
        return number_problems(self, rules)

    def problems_among(self, peers: int) -> list[str]:
        """Return what has no effect on rounds of this many peers; where the run has no problems."""
        waits_for_all = self.rounds == "synchronous" and self.quorum in (None, peers)
        if waits_for_all and self.grace_seconds != type(self).grace_seconds:
            return ["--grace-seconds has no effect with a quorum of all peers; give a smaller --quorum or drop this"]
        return []
