# SPDX-License-Identifier: Apache-2.0
"""How much of a list's strategies is computed again in the backward pass, so that all of them fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from megatron_ext.hot_switch.cost_model.step_time import Recompute
from megatron_ext.hot_switch.cost_model.suggest import Suggester
from megatron_ext.hot_switch.strategies.strategy import Strategy
from megatron_ext.hot_switch.strategies.strategy_list import check_strategies

__all__ = ["recompute_to_fit", "static_with_recomputation"]

_MORE_AND_MORE: tuple[Recompute, ...] = get_args(Recompute)


def recompute_to_fit(
    suggester: Suggester, strategies: Sequence[Strategy], bounds: Sequence[int]
) -> list[Strategy] | None:
    """Return strategies that compute again no more than they must to fit, but what they say themselves.

    Args:
        suggester: knows the memory.
        strategies: home first.
        bounds: of the buckets, descending to 0.

    Returns:
        None where one of them does not fit, whatever it computes again.
    """
    limit, shape = suggester.times.times.machine.memory, suggester.times.times.shape
    held = {
        recompute: suggester.memory(
            check_strategies(
                [replace(strategy, recompute=recompute) for strategy in strategies],
                bounds,
                world_size=suggester.gpus,
                shape=shape,
            )
        )
        for recompute in _MORE_AND_MORE
    }
    chosen = []
    for number, strategy in enumerate(strategies):
        allowed = _MORE_AND_MORE[_MORE_AND_MORE.index(strategy.recompute) :]
        least: Recompute | None = next((one for one in allowed if held[one][number] <= limit), None)
        if least is None:
            return None
        chosen.append(replace(strategy, recompute=least))
    return chosen


def static_with_recomputation(suggester: Suggester) -> list[Strategy]:
    """Return every single strategy that fits, each with no more computed again than it must."""
    fitting = [
        recompute_to_fit(suggester, [home], (suggester.context, 0))
        for home in suggester.homes
        if suggester.context % home.row_multiple == 0
    ]
    return [fitted[0] for fitted in fitting if fitted is not None]
