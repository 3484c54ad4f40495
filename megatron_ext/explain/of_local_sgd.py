# SPDX-License-Identifier: Apache-2.0
"""What local SGD adds: workers, the memory and the messages of rounds, and what a checkpoint holds of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_ext.explain.lone_rank import LoneRank, without_memory
from megatron_ext.explain.rank_figures import MemoryUse, RankFigures, SavedPart, TrafficUse
from megatron_ext.explain.units import gigabytes
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.engine import LocalSGD
from megatron_ext.local_sgd.feature import LocalSGDFeature
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.outer_optimizer import outer_states_per_anchor

__all__ = ["engine_of", "facts_of", "lines_of", "memory_of_rounds", "saved_parts", "traffic_of_rounds"]


def engine_of(rank: LoneRank, feature: LocalSGDFeature) -> LocalSGD:
    """Return the engine that the feature makes for a rank."""
    with without_memory():
        return feature.build_engine(rank.args, rank.model, rank.optimizer)


def memory_of_rounds(engine: LocalSGD, *, pinned: bool) -> Iterator[MemoryUse]:
    """Yield what a rank keeps for rounds, and needs in one.

    Args:
        engine: of the rank.
        pinned: whether what is kept on the host is in pinned memory, as it is where there is a GPU.
    """
    states = [fragment.state for fragment in engine.fragments]
    offloaded = any(state.is_offloaded for state in states)
    kept = [state.kept_bytes(pinned=pinned and offloaded) for state in states]
    for cause, nbytes in (
        ("anchor of local SGD", sum(anchor for anchor, _ in kept)),
        ("outer optimizer's states", sum(outer for _, outer in kept)),
    ):
        if nbytes:
            yield MemoryUse(cause=cause, nbytes=nbytes, place="host" if offloaded else "device")
    own = sum(state.own_bytes for state in states)
    if own:
        yield MemoryUse(cause="replicas and residuals of the codec, or late terms", nbytes=own)
    # Fragments that travel at the same time are kept at the same time.
    each = [fragment.message_bytes for fragment in engine.fragments]
    flying = sum(each) if engine.streaming.in_background else max(each)
    yield MemoryUse(cause="messages of a round", nbytes=flying, by_formula=True)
    if engine.streaming.in_background:
        sent = 4 * sum(value.numel() for value in engine.values)
        yield MemoryUse(cause="values of a round in flight", nbytes=sent, by_formula=True)


def traffic_of_rounds(engine: LocalSGD) -> Iterator[TrafficUse]:
    """Yield what a rank sends to other workers in an interval: every fragment once."""
    sent = sum(fragment.bytes_sent for fragment in engine.fragments)
    yield TrafficUse(cause="values to other workers, outward and homeward", nbytes=sent, per="interval", across=True)


def facts_of(asked: Any, workers: list[list[int]]) -> dict[str, Any]:
    """Return how workers meet, for programs."""
    config, streaming = LocalSGDConfig.from_args(asked), StreamingConfig.from_args(asked)
    return {
        "workers": len(workers),
        "interval": None if config.use_async else config.local_sgd_sync_interval,
        "interval_seconds": config.local_sgd_sync_time if config.use_async else None,
        "warmup_steps": config.local_sgd_warmup_steps,
        "codec": config.codec or "fp32",
        "fragments": streaming.fragments,
        "outer_optimizer": OuterOptimizerConfig.from_args(asked).name,
    }


def lines_of(facts: dict[str, Any], ranks: list[RankFigures], *, stages: int, step_tokens: int) -> Iterator[str]:
    """Yield the same for people, and what a worker sends.

    Args:
        facts: of `facts_of`.
        ranks: those that were built.
        stages: how many pipeline stages there are.
        step_tokens: of a worker's inner step.
    """
    interval = facts["interval"]
    every = f"{facts['interval_seconds']:g} s" if interval is None else f"{interval} steps"
    cut = "" if facts["fragments"] == 1 else f", {facts['fragments']} fragments"
    warm = f", after {facts['warmup_steps']} synchronous steps" if facts["warmup_steps"] else ""
    how = f"outer optimizer {facts['outer_optimizer']}, values travel as {facts['codec']}{cut}"
    if facts["workers"] == 1:
        yield f"one worker makes an outer step every {every}{warm}; outer optimizer {facts['outer_optimizer']}"
        return
    yield f"{facts['workers']} workers meet every {every}{warm}; {how}"
    if {stage for figures in ranks for stage in figures.stages} != set(range(stages)):
        return  # one rank was asked for, which says nothing about the others of its worker
    sent = sum(
        figures.sent("interval", across=True) * figures.stage_ranks * len(figures.stages) for figures in ranks
    )
    line = f"a worker sends {gigabytes(sent)} to the others per round"
    if interval is not None:
        tokens = interval * step_tokens
        line += f": {gigabytes(sent / interval)} per step, {gigabytes(sent / tokens)} per token"
    yield line


def saved_parts(asked: Any, *, workers: int, trained: int, optimizer_bytes: int) -> Iterator[SavedPart]:
    """Yield what a checkpoint at a sync point holds besides the model and worker 0's optimizer.

    Args:
        asked: Megatron's validated arguments.
        workers: W.
        trained: elements of what is trained.
        optimizer_bytes: of a worker's inner optimizer in a checkpoint.
    """
    config = LocalSGDConfig.from_args(asked)
    outer = outer_states_per_anchor(OuterOptimizerConfig.from_args(asked))
    if optimizer_bytes and workers > 1:
        yield SavedPart(
            content=f"inner optimizer of the other {workers - 1} workers", nbytes=(workers - 1) * optimizer_bytes
        )
    yield SavedPart(content="anchor and outer optimizer (fp32)", nbytes=4 * (1 + outer) * trained)
    if config.codec is not None:
        yield SavedPart(content="replica of the anchor, residuals of every worker", nbytes=4 * (1 + workers) * trained)
