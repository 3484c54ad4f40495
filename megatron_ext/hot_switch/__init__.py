# SPDX-License-Identifier: Apache-2.0
"""Hot switching: one job moves between parallel strategies inside a training step.

Planning (which strategies, what a switch moves, what that costs), carrying plans out on tensors, and splitting and
packing batches need no Megatron. `feature.py` brings them into its training loop; `guest.py` and `step.py` are the
heart of that.
"""

from megatron_ext.hot_switch.executor import SwitchExecutor
from megatron_ext.hot_switch.figures import Links, SwitchFigures, measure_plan
from megatron_ext.hot_switch.messages import MessageSizes
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
    "MessageSizes",
    "Move",
    "Stay",
    "Strategy",
    "StrategyList",
    "SwitchExecutor",
    "SwitchFigures",
    "SwitchPlan",
    "check_strategies",
    "measure_plan",
    "plan_switch",
    "read_strategies",
    "read_strategy_file",
]
