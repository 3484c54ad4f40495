# SPDX-License-Identifier: Apache-2.0
"""A worker that is left out round after round is said to be, seldom, and with the way out."""

import math

import pytest
import torch

from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.outer.lasting import lasting_remarks
from megatron_ext.outer.penalty import Penalty

UNITS = ["layer.0", "layer.1", "layer.2"]


def said_in(norm: float, rounds: int, *, units: int = 2, begin: int = 12, **fields: object) -> dict[int, list[str]]:
    """Return by round what is said while worker 2 has another norm in the first units, from the first such round on."""
    config = LocalSGDConfig(
        use_local_sgd=True, local_sgd_workers=4, skip_anomaly=True, ewma_warmup_steps=5, **fields
    )
    guard = Penalty(config, workers=4, units=3)
    found = {}
    for number in range(begin + rounds):
        # Each goes up and down, every other one at the same time.
        wiggle = torch.tensor([(-1) ** (number + worker) for worker in range(4)], dtype=torch.float64)
        norms = (1 + 0.01 * wiggle).unsqueeze(1).repeat(1, 3)
        if number >= begin:
            norms[2, :units] = norm
        verdicts = guard.decide(norms)
        by_unit = {unit: verdict.lasting for unit, verdict in zip(UNITS, verdicts, strict=True)}
        remarks = lasting_remarks(by_unit, "worker {}".format)
        if remarks:
            found[number - begin + 1] = list(remarks.values())
    return found


@pytest.mark.parametrize("relative", [False, True])
def test_a_worker_that_is_left_out_for_long_is_said_to_be_in_one_line_and_after_doublings_again(relative):
    found = said_in(5.0, 45, ewma_relative=relative)
    assert list(found) == [10, 20, 40]
    assert found[10] == [
        "worker 2 has been left out for 10 rounds running, now of 2 units (layer.0, layer.1); in layer.0 its norm "
        "is 5, the median of the others' 1.01: look at its data, its learning rate and its hardware; if all is well "
        "with it, raise --local-sgd-ewma-threshold, or drop --local-sgd-skip-anomaly"
    ]


def test_one_that_is_never_finite_is_said_too():
    (first, *_) = said_in(math.nan, 12, units=1).values()
    assert "now of 1 unit (layer.0); in layer.0 its norm is nan, the median of the others' 1.01" in first[0]


def test_one_that_is_well_now_and_then_is_not_said():
    assert said_in(5.0, 9) == {}


def test_where_levels_are_never_learned_that_is_the_way_out():
    config = LocalSGDConfig(
        use_local_sgd=True, local_sgd_workers=1, skip_anomaly=True, ewma_warmup_steps=5, ewma_relearn_rounds=0
    )
    guard = Penalty(config, workers=1, units=1)
    for number in range(32):
        (verdict,) = guard.decide(torch.full((1, 1), 1 + 0.01 * (-1) ** number + number // 22, dtype=torch.float64))
    (said,) = lasting_remarks({"layer.0": verdict.lasting}, "worker {}".format).values()
    assert "in layer.0 its norm is 1.99: look at" in said
    assert said.endswith("let a level that most workers share be learned, with --local-sgd-ewma-relearn-rounds above 0")
