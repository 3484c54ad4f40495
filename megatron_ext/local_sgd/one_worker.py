# SPDX-License-Identifier: Apache-2.0
"""One worker: an ordinary run, or one that makes outer steps by itself.

DiLoCo with a single worker (W = 1 in its scaling laws, arXiv 2503.09799): every H steps the outer optimizer moves the
anchor by the pseudo-gradient of the one worker, and training continues from there. With plain SGD outside this is
Lookahead (arXiv 1907.08610, Algorithm 1: phi <- phi + alpha (theta - phi)), with Nesterov momentum DiLoCo's step.
Nothing is sent. It is asked for by giving one worker and an outer optimizer; one worker alone trains as ever.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.config_options import FromArgs
from megatron_ext.outer.config import OuterOptimizerConfig

__all__ = ["changed_flags", "makes_rounds", "one_worker_problems"]

_WITHOUT_ROUNDS = frozenset(
    (
        *("--use-local-sgd", "--local-sgd-workers", "--local-sgd-sync-interval", "--local-sgd-warmup-steps"),
        *("--local-sgd-evaluation", "--local-sgd-round-log"),
    )
)
"""The schedule may stay where a run continues with one worker."""

_BY_ITSELF = frozenset(
    (*_WITHOUT_ROUNDS, "--local-sgd-cpu-offload", "--local-sgd-clip-pseudo-grad", "--local-sgd-is-debug")
)
"""What a worker that steps by itself can have besides its outer optimizer."""


def makes_rounds(args: Any) -> bool:
    """Return whether a run of Megatron has outer rounds: with several workers, or one that has an outer optimizer."""
    if not args.use_local_sgd or args.local_sgd_workers != 1:
        return bool(args.use_local_sgd)
    return OuterOptimizerConfig.from_args(args) != OuterOptimizerConfig()


def one_worker_problems(outer: OuterOptimizerConfig, *others: FromArgs, steps: bool) -> list[str]:
    """Return what one worker was given that needs several, one sentence at most for each rule.

    Args:
        outer: its outer optimizer; none is given where it makes no outer steps.
        others: the other configs of local SGD.
        steps: whether it makes outer steps by itself.
    """
    allowed = _BY_ITSELF if steps else _WITHOUT_ROUNDS
    idle = [flag for flag in changed_flags(*others) if flag not in allowed]
    if not steps:
        if not idle:
            return []
        return [
            f"--local-sgd-workers 1 trains one worker without outer rounds, so {', '.join(idle)} would have no effect; "
            "drop them, use at least 2 workers, or give the one an outer optimizer, as by --outer-optimizer-lr 0.7"
        ]
    found = []
    if idle:
        found.append(
            f"--local-sgd-workers 1 with an outer optimizer steps by itself, and {', '.join(idle)} need others to "
            "meet; drop them or use at least 2 workers"
        )
    if outer.outer_optim_class is None and outer.outer_optimizer == "none":
        found.append(
            "--outer-optimizer none averages the weights of one worker with nobody's; drop it to train without outer "
            "rounds, or give another one"
        )
    return found


def changed_flags(*configs: FromArgs) -> list[str]:
    """Return the flags whose values are not the defaults."""
    return [
        flag
        for config in configs
        for flag, default in type(config)().by_flag().items()
        if config.by_flag()[flag] != default
    ]
