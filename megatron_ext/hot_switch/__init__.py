# SPDX-License-Identifier: Apache-2.0
"""Hot switching: one job moves between parallel strategies inside a training step.

So far this plans: which strategies, what a switch moves, and what that costs. None of it needs Megatron. The engine
that carries plans out in a training step is not built yet.
"""

from megatron_ext.hot_switch.figures import Links, SwitchFigures, measure_plan
from megatron_ext.hot_switch.plan import Move, Stay, SwitchPlan, plan_switch
from megatron_ext.hot_switch.presets import PRESETS
from megatron_ext.hot_switch.senders import ALGORITHMS
from megatron_ext.hot_switch.strategy import Strategy
from megatron_ext.hot_switch.strategy_file import read_strategy_file
from megatron_ext.hot_switch.strategy_list import Bucket, StrategyList, check_strategies, read_strategies

__all__ = [
    "ALGORITHMS",
    "PRESETS",
    "Bucket",
    "Links",
    "Move",
    "Stay",
    "Strategy",
    "StrategyList",
    "SwitchFigures",
    "SwitchPlan",
    "check_strategies",
    "measure_plan",
    "plan_switch",
    "read_strategies",
    "read_strategy_file",
]
