# SPDX-License-Identifier: Apache-2.0
"""What the study trains, and by which methods."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.support.presets import Options, toy_gpt

__all__ = ["METHODS", "WORKERS", "Method", "Noise", "Run", "Study"]

WORKERS = 4
"""One process each."""

VOCABULARY = 257
"""Bytes, and the end of a document."""

MODEL: Options = {
    "num_layers": 4,
    "hidden_size": 144,
    "num_attention_heads": 4,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "position_embedding_type": "rope",
    "no_rope_fusion": True,
}

# The same for all methods: every run sees the same samples at the same iterations as the others of its seed.
TRAINING: Options = {
    "micro_batch_size": 8,
    "global_batch_size": 8 * WORKERS,
    "lr": 2e-3,
    "min_lr": 2e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 32,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "clip_grad": 1.0,
    "eval_iters": 8,
}

SHORT_INTERVAL = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Method:
    """One way to train; each is itself alone, so that runs can be keys although options cannot."""

    name: str
    """In files and cases."""

    title: str
    """For people."""

    options: Options
    """What it adds to the command line."""

    reference: str = ""
    """Name of the method whose validation loss its own is held against; the first of the study unless given."""

    goal: float | None = None
    """Largest quotient of the two that the project aims at; None where it has set no goal."""


def _diloco(interval: int) -> Options:
    return {
        "use_local_sgd": True,
        "local_sgd_workers": WORKERS,
        "local_sgd_sync_interval": interval,
        "outer_optimizer": "sgd",
        "outer_optimizer_lr": 0.7,
        "outer_optimizer_momentum": 0.8,
    }


# The whole penalty. The detector's warm-up is as short as it may be here: a run has a few dozen rounds, not thousands.
PENALTY: Options = {
    "local_sgd_skip_anomaly": True,
    "local_sgd_ewma_warmup_steps": 10,
    "local_sgd_pseudo_gradnorm_reduce": True,
    "local_sgd_clip_pseudo_grad": 10.0,
}

SYNCHRONOUS = Method(name="synchronous", title="synchronous", options={})
DILOCO = Method(name="diloco_h16", title="DiLoCo, H = 16", options=_diloco(SHORT_INTERVAL))
EDIT = Method(name="edit_h16", title="EDiT, H = 16", options={**_diloco(SHORT_INTERVAL), **PENALTY}, goal=1.02)
EDIT_LONG = Method(name="edit_h64", title="EDiT, H = 64", options={**_diloco(64), **PENALTY}, goal=1.02)

# With so few rounds a larger outer step, and less momentum that has to build up, lead further.
EDIT_FEW = Method(
    name="edit_h64_few",
    title="EDiT, H = 64, outer lr 1, momentum 0.7",
    options={**EDIT_LONG.options, "outer_optimizer_lr": 1.0, "outer_optimizer_momentum": 0.7},
    goal=1.02,
)

STREAMING = Method(
    name="streaming_int4",
    title="Streaming DiLoCo, H = 16, 4-bit",
    options={
        **_diloco(SHORT_INTERVAL),
        "local_sgd_fragments": 2,
        "local_sgd_fragment_sync_delay": 1,
        "local_sgd_codec": "int4",
    },
    reference="diloco_h16",
    goal=1.01,
)

RELATIVE = Method(
    name="edit_relative_h16",
    title="EDiT, H = 16, relative norms",
    options={**EDIT.options, "local_sgd_ewma_relative": True},
    goal=1.02,
)

METHODS = (SYNCHRONOUS, DILOCO, EDIT, EDIT_LONG, EDIT_FEW, STREAMING, RELATIVE)
"""All of them; another one is one more entry."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """One worker is fed uniformly random tokens for a while."""

    worker: int = WORKERS - 1
    """Which one."""

    first: int = 302
    """Iterations before those."""

    steps: int = 50
    """How many of them; the last is also the last of an interval. There must be an evaluation meanwhile."""

    methods: tuple[Method, ...] = (DILOCO, EDIT, RELATIVE)
    """Who suffers it: the plain mean, and those that should withstand."""

    interval: int = SHORT_INTERVAL
    """Of these methods."""

    @property
    def end(self) -> int:
        """Iterations after which the noise is over."""
        return self.first + self.steps

    @property
    def what(self) -> list[int]:
        """Return what happens in a run."""
        return [self.worker, self.first, self.steps]

    @property
    def recovered(self) -> int:
        """Iterations after the first interval without noise, when there must be an evaluation."""
        return self.end + self.interval


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    method: Method
    seed: int
    noisy: bool = False

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.method.name}-seed{self.seed}" + ("-noise" if self.noisy else "")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Where everything is, and how long a run is."""

    output: Path
    """Absolute folder of everything that is written."""

    iterations: int = 512
    """Of every run. All intervals end with it."""

    evaluation: int = 46
    """Iterations between evaluations. Each takes other samples, so only losses of the same iteration compare."""

    methods: tuple[Method, ...] = METHODS
    """What is compared; the first is what the others are held against."""

    noise: Noise = field(default_factory=Noise)
    """What the noisy runs suffer."""

    processes: int = WORKERS
    """Of every run."""

    overrides: Options = field(default_factory=dict)
    """Megatron options laid over all others."""

    @property
    def warmup(self) -> int:
        """Synchronous iterations at the start of local SGD: a quarter of a run, as in DiLoCo's paper."""
        return self.iterations // 4

    @property
    def timeout(self) -> float:
        """Seconds after which a run is taken to hang."""
        return max(3600.0, 7.0 * self.iterations)

    @property
    def noise_problem(self) -> str | None:
        """Why noise says nothing in runs of this length; None when it does."""
        noise = self.noise
        settled = self.warmup + int(str(EDIT.options["local_sgd_ewma_warmup_steps"])) * noise.interval
        if settled > noise.first:
            return f"there is noise after {noise.first} iterations, but detectors have settled after {settled} only"
        if noise.recovered > self.iterations:
            return f"workers have to recover from the noise until iteration {noise.recovered}, after the end"
        if noise.end // self.evaluation * self.evaluation <= noise.first:
            return f"there is no evaluation while there is noise, in iterations {noise.first + 1} to {noise.end}"
        return None

    @property
    def corpus(self) -> Path:
        """Prefix of the tokenized corpus."""
        return self.output / "corpus" / "stdlib"

    def reference(self, method: Method) -> Method:
        """Return the method that another one is held against."""
        name = method.reference or self.methods[0].name
        return next(other for other in self.methods if other.name == name)

    def result(self, run: Run) -> Path:
        """Return the file with what a finished run measured."""
        return self.output / "runs" / f"{run.name}.json"

    def round_log(self, run: Run) -> Path:
        """Return the file with the rounds of a run."""
        return self.output / "runs" / f"{run.name}.rounds.jsonl"

    @property
    def data(self) -> Options:
        """What is read."""
        return {
            "mock_data": None,
            "data_path": str(self.corpus),
            "data_cache_path": str(self.output / "index-cache"),
            "vocab_size": VOCABULARY,
            "split": "95,5,0",
        }

    def arguments(self, run: Run) -> list[str]:
        """Return the command line of examples/pretrain_gpt.py."""
        when: Options = {
            "seed": run.seed,
            "train_iters": self.iterations,
            "eval_interval": self.evaluation,
            "log_interval": self.evaluation,
        }
        rounds: Options = {}
        if run.method.options.get("use_local_sgd"):
            rounds = {"local_sgd_round_log": str(self.round_log(run)), "local_sgd_warmup_steps": self.warmup}
        return toy_gpt(MODEL, TRAINING, when, self.data, rounds, run.method.options, self.overrides)
