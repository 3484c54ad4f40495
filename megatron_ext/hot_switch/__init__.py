# SPDX-License-Identifier: Apache-2.0
"""Hot switching: one job moves between parallel strategies inside a training step.

Planning (which strategies, what a switch moves, what that costs), carrying plans out on tensors, and splitting and
packing batches need no Megatron. `feature.py` brings them into its training loop; `runtime/guest.py` and
`runtime/step.py` are the heart of that.

What is public is imported when it is first asked for: it needs torch, which options and their help do not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ext.hot_switch.cost_model.presets import PRESETS
    from megatron_ext.hot_switch.planning.figures import Links, SwitchFigures, measure_plan
    from megatron_ext.hot_switch.planning.plan import Move, Stay, SwitchPlan, plan_switch
    from megatron_ext.hot_switch.planning.senders import ALGORITHMS
    from megatron_ext.hot_switch.strategies.strategy import Strategy
    from megatron_ext.hot_switch.strategies.strategy_file import read_strategy_file
    from megatron_ext.hot_switch.strategies.strategy_list import Bucket, StrategyList, check_strategies, read_strategies
    from megatron_ext.hot_switch.transfer.executor import SwitchExecutor
    from megatron_ext.hot_switch.transfer.messages import MessageSizes

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

_PLACES = {
    "PRESETS": "cost_model.presets",
    "Links": "planning.figures",
    "SwitchFigures": "planning.figures",
    "measure_plan": "planning.figures",
    "Move": "planning.plan",
    "Stay": "planning.plan",
    "SwitchPlan": "planning.plan",
    "plan_switch": "planning.plan",
    "ALGORITHMS": "planning.senders",
    "Strategy": "strategies.strategy",
    "read_strategy_file": "strategies.strategy_file",
    "Bucket": "strategies.strategy_list",
    "StrategyList": "strategies.strategy_list",
    "check_strategies": "strategies.strategy_list",
    "read_strategies": "strategies.strategy_list",
    "SwitchExecutor": "transfer.executor",
    "MessageSizes": "transfer.messages",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
