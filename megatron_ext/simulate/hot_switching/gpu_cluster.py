# SPDX-License-Identifier: Apache-2.0
"""The GPUs of a simulated run: what they hold, compute and send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.simulate.number_rules import BANDWIDTH, TFLOPS, NumberRule, number_problems

if TYPE_CHECKING:
    from megatron_ext.hot_switch.cost_model.step_time import Machine

__all__ = ["GIB", "SimulatedCluster"]

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class SimulatedCluster:
    """GPUs, all alike."""

    memory_gib: float = 70.0
    """GiB of a GPU that training may use, with hot switching as without"""

    tflops: float = 140.0
    """10^12 operations per second that a GPU reaches in training, not those of its data sheet"""

    intra_node_bandwidth: float = 200.0
    """GB/s of one GPU to all others of its node, each way"""

    inter_node_bandwidth: float = 25.0
    """GB/s of one GPU to other nodes, each way"""

    def problems(self) -> list[str]:
        """Return what cannot be, one sentence each."""
        rules = {
            "memory_gib": NumberRule(least=1e-3, most=1e6),
            "tflops": TFLOPS,
            "intra_node_bandwidth": BANDWIDTH,
            "inter_node_bandwidth": BANDWIDTH,
        }
        return number_problems(self, rules)

    def machine(self, gpus_per_node: int) -> Machine:
        """Return the cost model's machine.

        Args:
            gpus_per_node: of a node.
        """
        # Not for the help, which needs no torch.
        from megatron_ext.hot_switch.cost_model.step_time import Machine
        from megatron_ext.hot_switch.planning.figures import Links

        return Machine(
            operations=self.tflops * 1e12,
            memory=self.memory_gib * GIB,
            links=Links(within_node=self.intra_node_bandwidth * 1e9, between_nodes=self.inter_node_bandwidth * 1e9),
            gpus_per_node=gpus_per_node,
        )
