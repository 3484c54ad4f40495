# SPDX-License-Identifier: Apache-2.0
"""Configuration of local SGD: the fields' docstrings are the help texts of the command line."""

# Annotations are evaluated here (no postponed evaluation): Megatron's argument factory reads the types.

import argparse
import math
from dataclasses import dataclass, field
from typing import Any, Literal, Self

__all__ = ["LocalSGDConfig", "OuterOptimizerConfig"]


@dataclass(frozen=True, kw_only=True)
class LocalSGDConfig:
    """Data-parallel workers train apart and meet every few steps through an outer optimizer."""

    use_local_sgd: bool = False
    """Cut the data-parallel dimension into workers that train apart and meet only in outer rounds."""

    local_sgd_workers: int | None = None
    """Number of workers W; must divide the data-parallel size. Each worker is an ordinary Megatron job of
    data-parallel size DP/W. The global batch size stays the sum over all workers."""

    local_sgd_sync_interval: int = 1
    """Interval H: inner steps between two outer rounds. DiLoCo uses some hundred; 1 synchronises at every
    step."""

    local_sgd_warmup_steps: int = 0
    """Iterations at the start of training during which gradients are synchronous over all workers. The anchor
    is taken when they end; the first outer round comes one interval later."""

    local_sgd_evaluation: Literal["synced", "workers"] = "synced"
    """What validation runs on: 'synced' = the anchor, the weights that all workers agreed on at the last
    round; 'workers' = each worker's own current weights, the reported loss being the mean over workers."""

    @classmethod
    def from_args(cls, args: Any) -> Self:
        """Read the fields from Megatron's argument namespace."""
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__})

    def problems(self) -> list[str]:
        """Return what is wrong with the values by themselves, one sentence each."""
        if not self.use_local_sgd:
            if self.local_sgd_workers is not None:
                return [
                    "--local-sgd-workers has no effect without --use-local-sgd; add it or drop the option"
                ]
            return []
        found = []
        if self.local_sgd_workers is None:
            found.append("--use-local-sgd needs --local-sgd-workers W, the number of workers")
        elif self.local_sgd_workers < 1:
            found.append(f"--local-sgd-workers is {self.local_sgd_workers}; it must be at least 1")
        if self.local_sgd_sync_interval < 1:
            found.append(
                f"--local-sgd-sync-interval is {self.local_sgd_sync_interval}; it must be at least 1 step"
            )
        if self.local_sgd_warmup_steps < 0:
            found.append(f"--local-sgd-warmup-steps is {self.local_sgd_warmup_steps}; it must be 0 or more")
        return found


@dataclass(frozen=True, kw_only=True)
class OuterOptimizerConfig:
    """The optimizer that applies the workers' averaged pseudo-gradient (DiLoCo, arXiv 2311.08105)."""

    outer_optimizer: str = "sgd"
    """Outer optimizer: 'sgd', 'adam', 'adamw', 'none' (plain averaging of the weights), or the import path of
    a torch optimizer class, such as mypackage.optimizers.Lion."""

    outer_optimizer_lr: float = 0.7
    """Outer learning rate."""

    outer_optimizer_momentum: float = 0.9
    """Momentum of the outer sgd."""

    outer_optimizer_nesterov: bool = field(
        default=True,
        metadata={
            "argparse_meta": {
                "arg_names": ["--outer-optimizer-nesterov"],
                "action": argparse.BooleanOptionalAction,
            }
        },
    )
    """Nesterov momentum in the outer sgd; no effect when the momentum is 0."""

    @classmethod
    def from_args(cls, args: Any) -> Self:
        """Read the fields from Megatron's argument namespace."""
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__})

    def problems(self) -> list[str]:
        """Return what is wrong with the values by themselves, one sentence each."""
        found = []
        if not math.isfinite(self.outer_optimizer_lr) or self.outer_optimizer_lr <= 0:
            found.append(
                f"--outer-optimizer-lr is {self.outer_optimizer_lr}; it must be a finite number above 0"
            )
        if not 0 <= self.outer_optimizer_momentum < 1:
            found.append(
                f"--outer-optimizer-momentum is {self.outer_optimizer_momentum}; it must be in [0, 1)"
            )
        return found
