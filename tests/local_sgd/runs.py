# SPDX-License-Identifier: Apache-2.0
"""Runs that the tests of local SGD share: toy GPTs of W workers in the real training loop."""

from __future__ import annotations

from tests.support.presets import LAYOUTS, PRECISIONS, Options, toy_gpt
from tests.support.pretrain import RankOutcome, run_pretrain

__all__ = ["GUARD", "arguments", "local_run", "model_digests", "same_state", "worker_slices"]

GUARD: Options = {
    "local_sgd_skip_anomaly": True,
    "local_sgd_ewma_warmup_steps": 2,
    "local_sgd_pseudo_gradnorm_reduce": True,
    "local_sgd_clip_pseudo_grad": 0.1,
}
"""All guards of the pseudo-gradient penalty."""


def arguments(
    layout: str, precision: str, *, workers: int | None, batch: int = 2, **overrides: object
) -> list[str]:
    """Return a command line with `batch` samples per worker and step; `workers=None` leaves local SGD off."""
    options: Options = {"train_iters": 6, "lr": 1e-2, "global_batch_size": batch * (workers or 1)}
    if LAYOUTS[layout].least_data_parallel_size > 1 and batch == 2:
        options = {**options, "global_batch_size": 4 * (workers or 1)}
    if workers is not None:
        options = {**options, "use_local_sgd": True, "local_sgd_workers": workers}
    return toy_gpt(LAYOUTS[layout].options, PRECISIONS[precision], options, **overrides)


def local_run(layout: str, precision: str, *, workers: int, **overrides: object) -> list[RankOutcome]:
    """Run `workers` workers of the smallest size that the layout allows."""
    return run_pretrain(
        arguments(layout, precision, workers=workers, **overrides), LAYOUTS[layout].world_size(workers)
    )


def worker_slices(ranks: list[RankOutcome], layout: str, workers: int) -> list[list[RankOutcome]]:
    """Return each worker's ranks in order: the data-parallel dimension varies faster than the pipeline's."""
    stages = int(LAYOUTS[layout].options.get("pipeline_model_parallel_size", 1))
    per_stage = len(ranks) // stages
    size = per_stage // workers
    return [
        [ranks[stage * per_stage + worker * size + index] for stage in range(stages) for index in range(size)]
        for worker in range(workers)
    ]


def model_digests(ranks: list[RankOutcome]) -> list[object]:
    """Return what identifies the weights of each rank: digests of the parameters and of the fp32 values."""
    return [(rank.parameters, rank.optimizer) for rank in ranks]


def same_state(left: list[RankOutcome], right: list[RankOutcome]) -> bool:
    """Return whether two runs ended with the same weights, bit for bit, on every rank."""
    return model_digests(left) == model_digests(right)
