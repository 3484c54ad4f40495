# SPDX-License-Identifier: Apache-2.0
"""What the tests of real runs on CPU share."""

import re

from tests.support.presets import Options
from tests.support.pretrain import RankOutcome, run_pretrain

DROPOUT: Options = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def stock(arguments: list[str], world_size: int) -> list[RankOutcome]:
    """Run stock Megatron with nothing but the backend."""
    return run_pretrain(arguments, world_size, patch="backend-only")


def losses(ranks: list[RankOutcome]) -> list[float]:
    """The losses of all iterations, from the last pipeline stage."""
    return ranks[-1].losses


def validation_losses(ranks: list[RankOutcome]) -> dict[int, str]:
    """The validation losses as printed, by iteration."""
    pattern = r"validation loss at iteration (\d+) \| lm loss value: (\S+)"
    return {int(iteration): loss for rank in ranks for iteration, loss in re.findall(pattern, rank.stdout)}
