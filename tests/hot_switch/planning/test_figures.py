# SPDX-License-Identifier: Apache-2.0
"""Figures of a plan: they are sums over its moves, and the published volumes come out."""

import math

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_ext.hot_switch import PRESETS, Links, measure_plan, plan_switch, read_strategies
from megatron_ext.params import GptShape, Layout, Placement
from tests.hot_switch.cases import chains

Case = tuple[GptShape, tuple[Layout, ...], int]

# By the strategy before the switch, in GiB: moved, from other nodes, sent by the busiest rank; pairs of ranks; slices.
NOTHING = (0.0, 0.0, 0.0, 0, 0)
TO_HOME_7B = (6.26, 0.0, 0.80, 8, 260)
VOLUMES = {
    "commoncrawl 7b 8": ("llama-7b", {"1,4,2": (87.71, 0.0, 10.96, 56, 4160), "8,1,1": NOTHING, "2,2,2": TO_HOME_7B}),
    "commoncrawl 7b 16": (
        "llama-7b",
        {"2,4,2": (175.42, 100.24, 10.96, 120, 8320), "16,1,1": NOTHING, "4,4,1": NOTHING},
    ),
    "commoncrawl 13b 8": (
        "llama-13b",
        {
            "1,8,1": (84.76, 0.0, 12.11, 28, 4536),
            "4,2,1": (12.11, 0.0, 1.54, 16, 324),
            "1,4,2": (21.20, 0.0, 3.03, 24, 1782),
        },
    ),
    "commoncrawl 13b 16": (
        "llama-13b",
        {
            "2,8,1": (169.51, 0.0, 12.11, 56, 9072),
            "8,2,1": (48.43, 0.0, 3.05, 16, 1296),
            "4,4,1": (36.32, 0.0, 3.03, 16, 1944),
        },
    ),
    "commoncrawl 32b 32": (
        "llama-32b",
        {
            "1,16,2": (227.08, 121.11, 7.57, 240, 14520),
            "4,2,4": (90.85, 60.58, 2.89, 88, 4840),
            "2,8,2": (52.98, 0.0, 3.78, 28, 3388),
        },
    ),
    "github 7b 8": (
        "llama-7b",
        {"1,4,2": (87.71, 0.0, 10.96, 56, 4160), "8,1,1": NOTHING, "4,2,1": NOTHING, "2,2,2": TO_HOME_7B},
    ),
    "github 7b 16": (
        "llama-7b",
        {
            "2,4,2": (175.42, 100.24, 10.96, 120, 8320),
            "16,1,1": NOTHING,
            "8,2,1": (25.06, 0.0, 1.59, 16, 1040),
            "4,4,1": NOTHING,
        },
    ),
    "github 13b 8": (
        "llama-13b",
        {
            "1,8,1": (84.76, 0.0, 12.11, 28, 4536),
            "4,2,1": NOTHING,
            "2,2,2": (12.11, 0.0, 1.53, 8, 324),
            "1,4,2": (21.20, 0.0, 3.03, 24, 1782),
        },
    ),
    "github 13b 16": (
        "llama-13b",
        {
            "2,8,1": (169.51, 0.0, 12.11, 56, 9072),
            "8,2,1": NOTHING,
            "4,2,2": (72.66, 48.44, 4.56, 44, 3240),
            "4,4,1": (36.32, 0.0, 3.03, 16, 1944),
        },
    ),
    "github 32b 32": (
        "llama-32b",
        {
            "1,16,2": (227.08, 121.11, 7.57, 240, 14520),
            "4,2,4": (181.68, 121.13, 5.77, 88, 4840),
            "4,4,2": (90.83, 0.0, 3.78, 32, 2904),
            "2,8,2": (52.98, 0.0, 3.78, 28, 3388),
        },
    ),
}


@pytest.mark.parametrize("case", VOLUMES)
def test_the_volumes_of_hotspas_experiments_come_out(case: str) -> None:
    model, expected = VOLUMES[case]
    shape = PRESETS[model]
    chosen = read_strategies(list(expected), shape=shape)
    for source, target in chosen.switches:
        figures = measure_plan(
            plan_switch(shape, source.layout(shape.num_layers), target.layout(shape.num_layers), gpus_per_node=8)
        )
        gib = (figures.bytes_total, figures.bytes_inter_node, figures.max_sent)
        found = (*(round(size / 2**30, 2) for size in gib), figures.messages, figures.slices)
        assert found == expected[source.label], (source.label, target.label)


@pytest.mark.parametrize(
    ("algorithm", "max_sent", "between"),
    [("balanced", 3.05, 0.0), ("round-robin", 6.05, 24.22), ("fcfs", 24.22, 24.22)],
)
def test_other_ways_to_choose_senders_can_be_compared(algorithm: str, max_sent: float, between: float) -> None:
    shape = PRESETS["llama-13b"]
    figures = measure_plan(plan_switch(shape, Layout(dp=8, tp=2), Layout(dp=4, tp=4), algorithm=algorithm))
    assert round(figures.max_sent / 2**30, 2) == max_sent
    assert round(figures.bytes_inter_node / 2**30, 2) == between
    assert round(figures.bytes_total / 2**30, 2) == 48.43


@pytest.mark.parametrize(
    ("algorithm", "max_sent", "max_between"), [("balanced", 16.14, 4.08), ("joint", 12.11, 6.06)]
)
def test_both_links_together_spare_the_busiest_sender_at_the_same_bytes_between_nodes(
    algorithm: str, max_sent: float, max_between: float
) -> None:
    before, after = Layout(dp=3, tp=4, pp=2), Layout(dp=12, tp=2)
    figures = measure_plan(plan_switch(PRESETS["llama-13b"], before, after, algorithm=algorithm))
    assert round(figures.bytes_inter_node / 2**30, 2) == 96.88
    assert round(figures.max_sent / 2**30, 2) == max_sent
    assert round(max(figures.sent_between) / 2**30, 2) == max_between


@settings(max_examples=40)
@given(chains())
def test_figures_are_sums_over_what_each_rank_sends_receives_and_keeps(case: Case) -> None:
    shape, (source, target), gpus_per_node = case
    plan = plan_switch(shape, source, target, gpus_per_node=gpus_per_node)
    figures = measure_plan(plan)
    slices = pairs = 0
    for rank in range(plan.world_size):
        for moved, within, between in (
            (plan.sends(rank), figures.sent_within, figures.sent_between),
            (plan.receives(rank), figures.received_within, figures.received_between),
        ):
            by_node = {True: 0, False: 0}
            for peer, moves in moved.items():
                by_node[peer // gpus_per_node == rank // gpus_per_node] += sum(move.nbytes for move in moves)
            assert (within[rank], between[rank]) == (by_node[True], by_node[False])
        slices += sum(map(len, plan.receives(rank).values()))
        pairs += len(plan.receives(rank))
        held = [
            sum(p.slice.numel * p.tensor.dtype.itemsize for p in Placement(shape, layout).on_rank(rank))
            for layout in (source, target)
        ]
        assert [figures.held_before[rank], figures.held_after[rank]] == held
        aliased = sum(
            math.prod(box.shape) * stay.tensor.dtype.itemsize
            for stay in plan.stays(rank)
            if stay.alias_offset is not None
            for box in stay.boxes
        )
        assert figures.aliased[rank] == aliased
    assert (figures.slices, figures.messages) == (slices, pairs)
    assert figures.max_held_during == max(figures.held_before + figures.held_after - figures.aliased)


def test_the_time_is_that_of_the_busiest_link() -> None:
    shape = PRESETS["llama-7b"]
    figures = measure_plan(plan_switch(shape, Layout(dp=2, tp=4, pp=2), Layout(dp=16)))
    most = figures.received_between.max()
    assert most == np.max([figures.sent_between, figures.received_between])
    assert figures.seconds(Links(within_node=1e12, between_nodes=1e9)) == pytest.approx(most / 1e9)
    assert figures.seconds(Links(within_node=1e9, between_nodes=1e15)) == pytest.approx(
        max(figures.received_within.max(), figures.sent_within.max()) / 1e9
    )
