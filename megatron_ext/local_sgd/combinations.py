# SPDX-License-Identifier: Apache-2.0
"""Which methods of local SGD exclude each other, inside Megatron and without it."""

from __future__ import annotations

from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.outer.codecs.all_codecs import CODECS
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.outer_optimizer import outer_optimizer_problems
from megatron_ext.outer.places import Where, place_problems
from megatron_ext.outer.reducer_config import GTAConfig

__all__ = ["method_problems"]


def method_problems(
    config: LocalSGDConfig, outer: OuterOptimizerConfig, gta: GTAConfig, streaming: StreamingConfig, place: Where
) -> list[str]:
    """Return the problems of the options of the outer rounds, alone and together, one sentence each.

    Args:
        config: schedule, penalty and codec.
        outer: the outer optimizer.
        gta: how pseudo-gradients become one.
        streaming: fragments.
        place: where the rounds are made.
    """
    problems = outer_optimizer_problems(outer, place) + gta.problems(config, place) + streaming.problems(config, outer)
    if config.codec is not None:
        problems += place_problems("--local-sgd-codec", CODECS, config.codec, place)
    if gta.in_pairs:
        problems += _pair_problems(config, gta, streaming)
    if streaming.eager and gta != GTAConfig():
        problems.append(
            "--local-sgd-eager-updates takes the plain mean; drop the --local-sgd-pseudo-grad options of the reducer"
        )
    if config.use_async and streaming.active and not streaming.eager:
        problems.append("--local-sgd-use-async has rounds of the whole model; drop the --local-sgd-fragment options")
    return problems + (_forward_problems(config, gta, streaming) if config.sync_in_forward else [])


def _pair_problems(config: LocalSGDConfig, gta: GTAConfig, streaming: StreamingConfig) -> list[str]:
    """Return why workers cannot meet in pairs."""
    reasons = {
        "knows the norms of two workers only; drop the options of the penalty": config.has_penalty,
        "is not combined with --local-sgd-codec; drop one of them": config.codec is not None,
        "is not combined with --local-sgd-use-async; drop one of them": config.use_async,
        "is not combined with --local-sgd-fragment options; drop them": streaming.active,
        "has no synced weights; validate each worker's own with --local-sgd-evaluation workers": (
            config.local_sgd_evaluation == "synced"
        ),
    }
    return [f"--local-sgd-pseudo-grad-reducer {gta.reducer} {reason}" for reason, holds in reasons.items() if holds]


def _forward_problems(config: LocalSGDConfig, gta: GTAConfig, streaming: StreamingConfig) -> list[str]:
    """Return why rounds cannot end in the forward pass."""
    others = {
        "--local-sgd-codec": config.codec is not None,
        "the --local-sgd-fragment options": streaming.active and not streaming.eager,
        "--local-sgd-eager-updates": streaming.eager,
        f"--local-sgd-pseudo-grad-reducer {gta.reducer}": gta.in_pairs,
        "--local-sgd-use-async": config.use_async,
    }
    return [
        f"--local-sgd-sync-in-forward is not combined with {other}; drop one of them"
        for other, given in others.items()
        if given
    ]
