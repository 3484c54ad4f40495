# SPDX-License-Identifier: Apache-2.0
"""What the SPES quickstart trains, when things happen, and the command lines of its processes."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from settings import IMPLEMENTATION, MEASURED, SCRIPT  # of the other quickstart

from megatron_ext.spes import Ownership, read_spes_config
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.server.config import read_config

ROOT = Path(__file__).resolve().parents[3]
SERVER_CONFIG = ROOT / "configs" / "spes_toy_server.yaml"
PEER_CONFIG = ROOT / "configs" / "spes_toy_peer.yaml"
RUN = "spes"
EXPERTS = 16

VICTIM = 1
"""Which peer is killed."""

DEFAULT_ITERATIONS = 400
LEAST_ROUNDS = 4

MODEL = {
    "num-layers": 3,
    "hidden-size": 96,
    "num-attention-heads": 4,
    "seq-length": 128,
    "max-position-embeddings": 128,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "ffn-hidden-size": 96,
    "hidden-dropout": 0,
    "attention-dropout": 0,
    "num-experts": EXPERTS,
    "moe-router-topk": 2,
    "moe-router-load-balancing-type": "aux_loss",
    "moe-aux-loss-coeff": 0.01,
    "moe-token-dispatcher-type": "alltoall",
}

TRAINING = {
    "micro-batch-size": 4,
    "global-batch-size": 4,
    "lr": 3e-3,
    "min-lr": 3e-4,
    "lr-decay-style": "cosine",
    "lr-warmup-fraction": 0.04,
    "weight-decay": 0.1,
    "adam-beta2": 0.95,
    "clip-grad": 1.0,
    "seed": 1234,
    "eval-iters": 8,
    "log-interval": 1,
}

DATA = {
    "tokenizer-type": "NullTokenizer",
    "vocab-size": 257,
    "make-vocab-size-divisible-by": 1,
    "split": "95,5,0",
    "num-workers": 0,
}


def server_config() -> RunConfig:
    """Return the run as the server has it."""
    found: RunConfig = read_config(SERVER_CONFIG)["runs"][RUN]
    return found


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When things happen, counted in iterations."""

    iterations: int
    """Length of the run."""

    interval: int = field(default_factory=lambda: server_config().sync_steps or 1)
    """Steps between two rounds."""

    def __post_init__(self) -> None:
        """Check the length.

        Raises:
            ValueError: it is too short, or does not end with a round.
        """
        if self.iterations % self.interval or self.rounds < LEAST_ROUNDS:
            raise ValueError(
                f"--iterations is {self.iterations}; it must be a multiple of {self.interval}, the steps between two "
                f"rounds, and at least {LEAST_ROUNDS * self.interval}"
            )

    @property
    def rounds(self) -> int:
        """Rounds of the run; the last one ends it."""
        return self.iterations // self.interval

    @property
    def checkpoint(self) -> int:
        """When the victim has saved what it continues from: in the middle of an interval."""
        return max(1, self.rounds // 5) * self.interval + 2 * self.interval // 5

    @property
    def kill(self) -> int:
        """When the victim is killed, at the earliest: a few steps later in the same interval."""
        return self.checkpoint + max(1, self.interval // 5)

    @property
    def server_round(self) -> int:
        """In which round the server is killed: one without the victim's trouble."""
        return max(self.checkpoint // self.interval + 2, 3 * self.rounds // 5)

    @property
    def evaluation(self) -> int:
        """Iterations between evaluations: at the end of a round, when all peers have the same model."""
        return max(1, self.rounds // 4) * self.interval


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All settings of one quickstart."""

    output: Path
    """Absolute folder of everything it writes."""

    schedule: Schedule

    @property
    def peers(self) -> int:
        """How many there are."""
        return server_config().peers

    @property
    def ownership(self) -> Ownership:
        """Who trains which experts."""
        return read_spes_config(PEER_CONFIG).ownership(self.peers, EXPERTS)

    @property
    def corpus(self) -> Path:
        """Prefix of the tokenized corpus."""
        return self.output / "corpus" / "stdlib"

    @property
    def server_folder(self) -> Path:
        """The server's state."""
        return self.output / "server"

    @property
    def journal(self) -> Path:
        """What the server writes down."""
        return self.server_folder / "runs" / RUN / "journal.jsonl"

    def log(self, name: str) -> Path:
        """Return the log of the server, of a peer or of a stage."""
        return self.output / f"{name}.log"

    def records(self, peer: int) -> Path:
        """Return the folder of what the instrument has seen in a peer."""
        return self.output / "records" / f"node{peer}"

    def prepare_data(self) -> list[str]:
        """Return the command that makes the corpus."""
        command = [sys.executable, "-m", "megatron_ext.cli.main", "data", "prepare", "--stdlib"]
        return [*command, "--output-prefix", str(self.corpus), "--reuse", "--overwrite"]

    def server(self, address: str) -> list[str]:
        """Return the command that starts the server, for the first time or again.

        Args:
            address: where it should listen.
        """
        command = [sys.executable, "-m", "megatron_ext.cli.main", "server", "start", "--config", str(SERVER_CONFIG)]
        return [*command, "--dir", str(self.server_folder), "--bind", address]

    def peer(self, peer: int, address: str, *, resume: bool = False) -> list[str]:
        """Return the command that starts a peer.

        Args:
            peer: which one.
            address: of the server.
            resume: whether to continue from its checkpoint.
        """
        schedule, checkpoints = self.schedule, self.output / "checkpoints" / f"node{peer}"
        options = {
            **MODEL,
            **TRAINING,
            **DATA,
            "train-iters": schedule.iterations,
            "eval-interval": schedule.evaluation,
            "data-path": self.corpus,
            "data-cache-path": self.output / "index-cache",
            "distributed-backend": "gloo",
            "save": checkpoints,
            "save-interval": schedule.checkpoint,
            **({"load": checkpoints} if resume else {}),
            "spes-config": PEER_CONFIG,
            "sync-service": address,
            "sync-service-index": peer,
        }
        measured = [str(MEASURED), "--record", str(self.records(peer)), "--workers", "1", "--backend", "cpu"]
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [sys.executable, *measured, str(SCRIPT), *flags, "--swiglu", "--disable-bias-linear", *IMPLEMENTATION]


def environment() -> dict[str, str]:
    """Return the environment of a peer, a job of one process: what a launcher would set, and one thread."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return {**os.environ, **alone, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
