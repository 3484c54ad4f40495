# SPDX-License-Identifier: Apache-2.0
"""Two sides of Megatron jobs that train by turns, block by block, and one job with instruments."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.turns import Turns

__all__ = [
    "FAR_AWAY",
    "LOCAL_SGD",
    "STOCK",
    "WORKERS",
    "Outcome",
    "Plan",
    "compare_rank",
    "instrumented_rank",
    "require_equal_weights",
]

WORKERS = 2

LOCAL_SGD, STOCK = 0, 1
"""The two sides: one job of two workers; two jobs."""

FAR_AWAY = 10**6
"""An interval that no run reaches: of rounds, and of log lines, which meet across workers too."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One comparison, as every process needs to know it."""

    arguments: tuple[str, ...]
    """Megatron options of both sides."""

    micro_batch_size: int
    ranks_per_worker: int
    blocks: int
    """Blocks of each side, warm-up included."""

    block: int
    """Iterations of a block."""

    ports: tuple[int, ...]
    """A rendezvous for every worker or job, side by side."""

    script: str

    stock_only: bool
    """Whether stock jobs stand on both sides."""

    def is_stock(self, side: int) -> bool:
        """Return whether stock jobs stand on `side`."""
        return self.stock_only or side == STOCK

    @property
    def side_processes(self) -> int:
        """Processes of one side; the two are equal."""
        return WORKERS * self.ranks_per_worker

    def command_line(self, side: int, iterations: int) -> tuple[str, ...]:
        """Return the script's arguments for a job of `side`."""
        batch = self.micro_batch_size * self.ranks_per_worker
        words = [*self.arguments, "--train-iters", str(iterations), "--global-batch-size"]
        if self.is_stock(side):
            return (*words, str(batch))
        sync = ["--use-local-sgd", "--local-sgd-workers", str(WORKERS), "--local-sgd-sync-interval", str(FAR_AWAY)]
        return (*words, str(batch * WORKERS), *sync)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one process of the comparison measured."""

    side: int
    worker: int
    """The worker, or the stock job fed the same samples."""

    seconds: list[float]
    """Time of every block."""

    weights: Any
    """Digests of parameters and optimizer at the end."""


def compare_rank(plan: Plan) -> Outcome:
    """Be one process of the comparison: a rank of one of its jobs."""
    from benchmarks.turns import Place, Turns
    from tests.support.pretrain_rank import pretrain_rank, shift_sampler

    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    side, place_in_side = divmod(rank, plan.side_processes)
    worker, rank_in_worker = divmod(place_in_side, plan.ranks_per_worker)
    if plan.is_stock(side):
        _become(rank_in_worker, plan.ranks_per_worker, plan.ports[side * WORKERS + worker])
    else:
        _become(place_in_side, plan.side_processes, plan.ports[side * WORKERS])
    turns = Turns(
        Place(
            port=port,
            side=side,
            side_processes=plan.side_processes,
            processes=2 * plan.side_processes,
            blocks=plan.blocks,
        )
    )
    record = pretrain_rank(
        plan.script,
        # One iteration more than the blocks have: its start ends the last block.
        plan.command_line(side, plan.blocks * plan.block + 1),
        "backend-only" if plan.is_stock(side) else "script",
        None,
        (
            partial(_take_turns, turns, plan.block),
            *([partial(shift_sampler, worker, WORKERS)] if plan.is_stock(side) else []),
        ),
    )
    return Outcome(side=side, worker=worker, seconds=turns.seconds, weights=(record.parameters, record.optimizer))


def instrumented_rank(plan: Plan, iterations: int) -> Any:
    """Be one rank of the local-SGD job with the instruments on, and return what they saw."""
    from benchmarks import hook_clock
    from tests.support.pretrain_rank import pretrain_rank

    command_line = plan.command_line(LOCAL_SGD, iterations + 2)
    return pretrain_rank(plan.script, command_line, "script", hook_clock.step_counts, (hook_clock.install,)).probe


def require_equal_weights(outcomes: list[Outcome]) -> None:
    """Refuse a comparison of two sides that did not compute the same."""
    for worker in range(WORKERS):
        ours, stock = (
            [found.weights for found in outcomes if found.side == side and found.worker == worker]
            for side in (LOCAL_SGD, STOCK)
        )
        if ours != stock:
            raise RuntimeError(
                f"worker {worker} and the stock job fed its samples ended with different weights, so the two sides "
                "did different work; the times say nothing"
            )


def _take_turns(turns: Turns, iterations: int) -> None:
    from megatron.training import training

    training.train_step = turns.around(training.train_step, iterations)


def _become(rank: int, world_size: int, port: int) -> None:
    """Make this process a rank of a job whose first rank holds the job's store."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_PORT=str(port),
    )
