# SPDX-License-Identifier: Apache-2.0
"""How many small messages a round has beside its values: docs/simulate.md says what they take on slow links."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.engines import engine_of, moved, start_groups
from tests.support.distributed import run_ranks

PAGE = Path(__file__).resolve().parents[3] / "docs" / "simulate.md"
KINDS = {
    "without a delay": [{}],
    "without a delay, with a penalty or codec": [
        {"penalty": {"codec": "int8"}},
        {"penalty": {"clip_pseudo_grad": 1.0}},
    ],
    "with a delay": [{"streaming": {"sync_delay": 2}}],
    "eager": [{"streaming": {"eager": True}}],
}


def sums_and_broadcasts(options, observe):
    """Return the sums and broadcasts across workers of one round."""
    groups = start_groups()
    values = [torch.zeros(30), torch.zeros(70)]
    engine = engine_of(values, groups=groups, interval=4, observe=observe, **options)
    engine.take_anchor()
    found = {"all_reduce": 0, "broadcast": 0}

    def counted(name):
        original = getattr(dist, name)

        def call(tensor, *args, **kwargs):
            if kwargs.get("group") is groups[0]:
                assert tensor.numel() < 30  # smaller than any value
                found[name] += 1
            return original(tensor, *args, **kwargs)

        setattr(dist, name, call)

    for step in range(1, 9):
        if step == 5:  # of the second interval, which begins and ends like any later one
            counted("all_reduce")
            counted("broadcast")
        moved(values, step)
        if engine.count_step():
            engine.advance()
    return found["all_reduce"], found["broadcast"]


def told() -> dict[str, tuple[int, int]]:
    """Return the sums and broadcasts that the page tells, by kind of round."""
    rows = re.findall(r"^\| ([^|]+?) \| (\d) \+ (\d) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {kind: (int(sums), int(broadcasts)) for kind, sums, broadcasts in rows}


@pytest.mark.parametrize("observe", [False, True], ids=["no_log", "round_log"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, options) for kind, several in KINDS.items() for options in several],
    ids=["plain", "codec", "penalty", "delay", "eager"],
)
def test_a_round_has_as_many_small_sums_as_the_page_says(kind: str, options: dict[str, Any], observe: bool):
    sums, broadcasts = told()[kind]
    more = observe and kind != "eager"  # there the workers have no step in common to observe
    assert run_ranks(sums_and_broadcasts, 2, options, observe) == [(sums + more, broadcasts + more)] * 2


def test_the_page_tells_all_kinds_and_what_they_take():
    assert told().keys() == KINDS.keys()
    text = PAGE.read_text(encoding="utf-8")
    for kind, (sums, broadcasts) in told().items():
        times = [50 * (2 * (workers - 1) * sums + (workers - 1).bit_length() * broadcasts) for workers in (2, 4, 8)]
        assert f"| {kind} | {sums} + {broadcasts} | {' | '.join(f'{time:,}' for time in times)} |" in text
