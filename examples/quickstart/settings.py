# SPDX-License-Identifier: Apache-2.0
"""What the quickstart trains, and the command lines of its runs."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1]
SCRIPT = EXAMPLES / "pretrain_gpt.py"
MEASURED = EXAMPLES / "quickstart" / "measured_pretrain.py"

WORKERS = 2
DEFAULT_ITERATIONS = 260
LEAST_ITERATIONS = 12
"""Fewer leave no room for three rounds, the middle of an interval and two rounds after it."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the runs train."""

    backend: str
    """'cpu' or 'cuda', as for `python -m megatron_ext --backend`."""

    tensor_parallel: int
    """Tensor-parallel size of a worker, which is all of a worker here."""

    @property
    def processes(self) -> int:
        """Ranks of a run."""
        return WORKERS * self.tensor_parallel

    def describe(self) -> str:
        """Return a short phrase for people."""
        return f"{self.processes} processes on " + ("the CPU" if self.backend == "cpu" else "GPUs")

    def environment(self) -> dict[str, str]:
        """Return the environment of a run."""
        environment = dict(os.environ)
        if self.backend == "cpu":
            # More threads than cores would only wait for each other.
            cores = len(os.sched_getaffinity(0))
            environment["OMP_NUM_THREADS"] = str(max(1, cores // self.processes))
            environment["CUDA_VISIBLE_DEVICES"] = ""
        else:
            environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        return environment


def choose_machine(backend: str, gpus: int) -> Machine:
    """Decide where to train.

    Args:
        backend: 'cpu', 'cuda', or 'auto' for GPUs where there are enough of them.
        gpus: GPUs that torch sees.

    Raises:
        ValueError: 'cuda' with too few GPUs.
    """
    if backend == "cuda" and gpus < WORKERS:
        raise ValueError(
            f"--backend cuda needs {WORKERS} GPUs, one per worker, and torch sees {gpus}; use --backend cpu or auto"
        )
    if backend == "cpu" or gpus < WORKERS:
        return Machine(backend="cpu", tensor_parallel=2)
    return Machine(backend="cuda", tensor_parallel=2 if gpus >= 2 * WORKERS else 1)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When things happen, counted in iterations."""

    iterations: int
    """Length of a run."""

    def __post_init__(self) -> None:
        """Check the length.

        Raises:
            ValueError: it is too short to show anything.
        """
        if self.iterations < LEAST_ITERATIONS:
            raise ValueError(f"--iterations is {self.iterations}; it must be at least {LEAST_ITERATIONS}")

    @property
    def interval(self) -> int:
        """H: steps between two outer rounds."""
        return max(3, self.iterations // 13)

    @property
    def rounds(self) -> int:
        """Outer rounds of a run. What they leave over at the start, at least one step, is warm-up."""
        return (self.iterations - 1) // self.interval

    @property
    def warmup(self) -> int:
        """Synchronous iterations at the start of the local SGD run; its last iteration ends with a round."""
        return self.iterations - self.rounds * self.interval

    @property
    def checkpoint(self) -> int:
        """When the checkpoint to resume is saved: in the middle of an interval, two rounds before the end."""
        return self.iterations - 2 * self.interval + self.interval // 2

    @property
    def evaluation(self) -> int:
        """Iterations between evaluations; one more comes at the end."""
        return 3 * self.interval

    @property
    def log(self) -> int:
        """Iterations between log lines."""
        return max(1, self.iterations // 13)


MODEL = {
    "num-layers": 4,
    "hidden-size": 160,
    "num-attention-heads": 4,
    "seq-length": 128,
    "max-position-embeddings": 128,
    "position-embedding-type": "rope",
    "hidden-dropout": 0,
    "attention-dropout": 0,
}

# Megatron's own kernels, so that neither Transformer Engine nor Apex is needed.
IMPLEMENTATION = (
    "--transformer-impl",
    "local",
    "--attention-backend",
    "unfused",
    "--no-rope-fusion",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-persist-layer-norm",
)

TRAINING = {
    "micro-batch-size": 8,
    "global-batch-size": 8 * WORKERS,
    "lr": 1.5e-3,
    "min-lr": 1.5e-4,
    "lr-decay-style": "cosine",
    "lr-warmup-fraction": 0.04,
    "weight-decay": 0.1,
    "adam-beta2": 0.95,
    "clip-grad": 1.0,
    "seed": 1234,
    "eval-iters": 8,
}

# DiLoCo's, except for the momentum (0.9): it would remember most of so short a run.
OUTER = {
    "outer-optimizer": "sgd",
    "outer-optimizer-lr": 0.7,
    "outer-optimizer-momentum": 0.6,
}


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """All settings of one quickstart."""

    output: Path
    """Absolute folder of everything it writes."""

    schedule: Schedule
    machine: Machine

    @property
    def corpus(self) -> Path:
        """Prefix of the tokenized corpus."""
        return self.output / "corpus" / "stdlib"

    @property
    def checkpoints(self) -> Path:
        """Where the local SGD run saves."""
        return self.output / "checkpoints"

    @property
    def index_cache(self) -> Path:
        """Where Megatron keeps its sample indices."""
        return self.output / "index-cache"

    def records(self, run: str) -> Path:
        """Return the folder of the instrument's files of a run."""
        return self.output / "records" / run

    def log(self, stage: str) -> Path:
        """Return the log of a stage."""
        return self.output / f"{stage}.log"

    def prepare_data(self) -> list[str]:
        """Return the command that makes the corpus."""
        command = [sys.executable, "-m", "megatron_ext.cli.main", "data", "prepare", "--stdlib"]
        return [*command, "--output-prefix", str(self.corpus), "--reuse", "--overwrite"]

    def synchronous(self) -> list[str]:
        """Return the command of stock Megatron: every gradient is averaged over all workers."""
        return self._pretrain("synchronous", [])

    def local_sgd(self) -> list[str]:
        """Return the command of the same run with DiLoCo."""
        save = ["--save", str(self.checkpoints), "--save-interval", str(self.schedule.checkpoint)]
        return self._pretrain("local_sgd", [*self._diloco(), *save])

    def resumed(self) -> list[str]:
        """Return the command that resumes from the checkpoint in the middle of an interval."""
        load = ["--load", str(self.checkpoints), "--ckpt-step", str(self.schedule.checkpoint)]
        return self._pretrain("resumed", [*self._diloco(), *load])

    def _diloco(self) -> list[str]:
        options = {
            "local-sgd-workers": WORKERS,
            "local-sgd-sync-interval": self.schedule.interval,
            "local-sgd-warmup-steps": self.schedule.warmup,
            **OUTER,
        }
        return ["--use-local-sgd", *_flags(options), "--outer-optimizer-nesterov"]

    def _pretrain(self, run: str, more: list[str]) -> list[str]:
        machine, schedule = self.machine, self.schedule
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(machine.processes)]
        measured = [str(MEASURED), "--record", str(self.records(run)), "--workers", str(WORKERS)]
        timing = {
            "train-iters": schedule.iterations,
            "eval-interval": schedule.evaluation,
            "log-interval": schedule.log,
        }
        data = {
            "data-path": self.corpus,
            "data-cache-path": self.index_cache,
            "tokenizer-type": "NullTokenizer",
            "vocab-size": 257,
            "make-vocab-size-divisible-by": 1,
            "split": "95,5,0",
            "num-workers": 0,
        }
        placement = ["--tensor-model-parallel-size", str(machine.tensor_parallel)]
        if machine.backend == "cpu":
            placement += ["--distributed-backend", "gloo"]
        else:
            # Resuming bit for bit needs sums in a fixed order, which GPU kernels do not have by default.
            placement += ["--deterministic-mode"]
        return [
            *launcher,
            *measured,
            *("--backend", machine.backend, str(SCRIPT)),
            *_flags(MODEL),
            *IMPLEMENTATION,
            *_flags(TRAINING),
            *_flags(timing),
            *_flags(data),
            *placement,
            *more,
        ]


def _flags(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]
