# SPDX-License-Identifier: Apache-2.0
"""What the study trains: the same mixture of experts at one place, and at peers that own a part of the experts each."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.convergence.settings import Method, Noise, Run, Study
from tests.support.presets import MOE, Options, command_line, toy_gpt

__all__ = ["CENTRALIZED", "METHODS", "RANKS", "SpesMethod", "SpesStudy"]

RANKS = 2
"""Processes of the centralized job, data parallel."""

MODEL: Options = {
    **MOE,
    "num_experts": 16,
    "num_layers": 3,
    "hidden_size": 128,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "position_embedding_type": "rope",
    "no_rope_fusion": True,
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
}

TRAINING: Options = {
    "micro_batch_size": 8,
    "lr": 2e-3,
    "min_lr": 2e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 50,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "clip_grad": 1.0,
}

VALIDATION_SEQUENCES = 128
"""Of every evaluation; all runs of a seed see the same ones."""

INTERVAL = 50


@dataclass(frozen=True, kw_only=True, eq=False)
class SpesMethod(Method):
    """One way to train."""

    server: dict[str, Any] | None = None
    """Settings of the run at the server; None for the centralized job."""

    started: bool = False
    """Whether the peers continue from a centralized job that made the first iterations (`SpesStudy.start`)."""


CENTRALIZED = SpesMethod(name="centralized", title="centralized", options={})
FEDAVG = SpesMethod(
    name="fedavg_h50",
    title="all experts everywhere",
    options={"using_spes": True, "using_dilico": True, "sync_service_interval": INTERVAL},
    server={"sync_steps": INTERVAL},
)
SPES = SpesMethod(
    name="spes_h50",
    title="SPES",
    options={"using_spes": True, "sync_service_interval": INTERVAL},
    # Merging in every round, ever less until the last one.
    server={"sync_steps": INTERVAL, "merge_interval": INTERVAL, "merge_alpha_start": 0.5},
    goal=1.03,
)
STARTED = SpesMethod(
    name="spes_h50_started",
    title="SPES after a centralized start",
    options=SPES.options,
    # Merging helps experts that have learned nothing yet; these have.
    server={
        "sync_steps": INTERVAL,
        "outer_optimizer": "sgd",
        "outer_optimizer_lr": 1.0,
        "outer_optimizer_momentum": 0.7,
    },
    started=True,
    goal=1.03,
)


def _with_owners(count: str, *owners: str) -> SpesMethod:
    """Return a method in which several peers own each expert: every group of owners as many experts as the others."""
    per_group = int(str(MODEL["num_experts"])) // len(owners)
    return replace(
        STARTED,
        name=f"spes_h50_{count}_owners",
        title=f"{STARTED.title}, {count} owners per expert",
        options={**STARTED.options, "spes_expert_owners": [group for group in owners for _ in range(per_group)]},
    )


TWO_OWNERS = _with_owners("two", "0,1", "1,2", "2,3", "0,3")
THREE_OWNERS = _with_owners("three", "0,1,2", "1,2,3", "0,2,3", "0,1,3")
METHODS = (CENTRALIZED, FEDAVG, SPES, STARTED, TWO_OWNERS, THREE_OWNERS)
"""All of them; another one is one more entry."""


@dataclass(frozen=True, kw_only=True)
class SpesStudy(Study):
    """Where everything is, and how long a run is."""

    iterations: int = 500
    """Of every run. All intervals end with it."""

    evaluation: int = 100
    """Iterations between evaluations, a whole number of intervals: peers then have the same weights."""

    methods: tuple[Method, ...] = METHODS
    """What is compared; the first is what the others are held against."""

    noise: Noise = field(default_factory=lambda: Noise(methods=()))
    """There is none here."""

    peers: int = 4
    """Which share out the experts evenly."""

    sequences: int = 8
    """Of a peer's step; a centralized step takes as many as all peers together."""

    @property
    def start(self) -> int:
        """Iterations of a centralized start: three tenths, after which intervals end where those of the others do."""
        return self.iterations * 3 // 10

    @property
    def experts(self) -> int:
        """Of a layer."""
        return int(str({**MODEL, **self.overrides}["num_experts"]))

    def arguments(self, run: Run) -> list[str]:
        """Return what makes a run: a command line without addresses, and the server's settings."""
        server = self.server(run.method)
        made = self.command(run) + ([] if server is None else [f"server: {json.dumps(server, sort_keys=True)}"])
        return made + (["start:", *self.start_command(run)] if self.is_started(run.method) else [])

    @staticmethod
    def is_started(method: Method) -> bool:
        """Return whether the peers of a method continue from a centralized job."""
        return bool(getattr(method, "started", False))

    def server(self, method: Method) -> dict[str, Any] | None:
        """Return the settings of the run at the server; None for the centralized job."""
        settings = getattr(method, "server", None)
        if settings is None:
            return None
        merging = {"merge_decay_steps": self.iterations} if "merge_interval" in settings else {}
        return {"peers": self.peers, **settings, **merging}

    def start_command(self, run: Run, folder: str = "") -> list[str]:
        """Return the command line of the centralized job that begins a run, and leaves a checkpoint in a folder."""
        first = Run(method=CENTRALIZED, seed=run.seed)
        ends: Options = {"save": folder, "save_interval": self.start, "exit_interval": self.start}
        return self.command(first) + command_line(ends)

    def command(self, run: Run, peer: int = 0, address: str = "", start: str = "") -> list[str]:
        """Return the command line of examples/pretrain_gpt.py.

        Args:
            run: the run.
            peer: which one.
            address: of the server.
            start: folder of the checkpoint of a centralized start.
        """
        together = 1 if self.server(run.method) is None else self.peers
        sequences = self.sequences * self.peers // together
        when: Options = {
            "seed": run.seed,
            "train_iters": self.iterations,
            "eval_interval": self.evaluation,
            "log_interval": self.evaluation,
            "global_batch_size": sequences,
            "eval_iters": VALIDATION_SEQUENCES // sequences,
        }
        where: dict[str, Any] = {}
        if together > 1:
            by_count = not {"using_dilico", "spes_expert_owners"} & run.method.options.keys()
            where = {
                "spes_num_train_experts_per_node": self.experts // self.peers if by_count else None,
                "sync_service": address,
                "sync_service_index": peer,
                "sync_service_peers": self.peers,
                # If one fails, the others must not wait for it for an hour.
                "sync_service_round_seconds": 300,
            }
        if self.is_started(run.method):
            where |= {"load": start}
        return toy_gpt(MODEL, TRAINING, when, self.data, run.method.options, where, self.overrides)
