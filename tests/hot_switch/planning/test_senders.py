# SPDX-License-Identifier: Apache-2.0
"""The rules that choose senders, each on its own."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.hot_switch.planning.routes import make_route
from megatron_ext.hot_switch.planning.senders import ALGORITHMS

# Ranks 0 to 3 hold everything, ranks 4 to 7 need it; nodes of 4, so that everything crosses.
ACROSS = make_route([(0, 1, 2, 3)], [(4, 5, 6, 7)], 4)
# Ranks 0 and 4 hold everything, everybody needs it; an owner on each node.
SPREAD = make_route([(0, 4)], [tuple(range(8))], 4)
# Two slices, each with two owners and two receivers, on one node.
PAIRS = make_route([(0, 1), (2, 3)], [(4, 5, 6, 7)], 8)


def choices(name: str, *tensors: tuple[object, int]) -> list[list[int]]:
    choose = ALGORITHMS[name](8)
    return [choose(route.demands, size) for route, size in tensors]


def test_fcfs_takes_the_first_owner() -> None:
    assert choices("fcfs", (ACROSS, 1), (SPREAD, 1)) == [[0] * 4, [0] * 6]


def test_round_robin_restarts_with_every_slice() -> None:
    assert choices("round-robin", (ACROSS, 1), (PAIRS, 1)) == [[0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 2, 3]]


def test_greedy_evens_out_the_slices_between_two_ranks_whatever_their_size() -> None:
    assert choices("greedy", *[(ACROSS, size) for size in (5, 1, 1, 1, 1)]) == [[n] * 4 for n in (0, 1, 2, 3, 0)]


def test_balanced_evens_out_bytes() -> None:
    assert choices("balanced", (ACROSS, 2), (ACROSS, 1), (ACROSS, 1)) == [[0, 1, 2, 3]] * 3
    one = make_route([(0, 1, 2, 3)], [(4,)], 4)
    assert choices("balanced", (one, 3), (one, 1), (one, 1), (one, 1), (one, 1)) == [[0], [1], [2], [3], [1]]


def test_balanced_prefers_the_receivers_node_and_counts_both_links_apart() -> None:
    near, far = make_route([(0, 1)], [(2,)], 4), make_route([(0, 1)], [(4,)], 4)
    assert choices("balanced", (SPREAD, 1)) == [[0, 0, 0, 4, 4, 4]]
    assert choices("balanced", (near, 9), (far, 1), (near, 1), (far, 1)) == [[0], [0], [1], [1]]


def test_joint_counts_both_links_together_and_serves_who_has_no_choice_first() -> None:
    near, far = make_route([(0, 1)], [(2,)], 4), make_route([(0, 1)], [(4,)], 4)
    assert choices("joint", (near, 9), (far, 1), (near, 1), (far, 1)) == [[0], [1], [1], [1]]
    # Of two slices, rank 0 alone holds the second: it sends that, and its neighbour the first.
    assert choices("joint", (make_route([(0, 1), (0,)], [(2,), (3,)], 4), 1)) == [[1, 0]]


@given(st.lists(st.tuples(st.sampled_from((ACROSS, SPREAD, PAIRS)), st.integers(1, 9)), max_size=8))
def test_balanced_always_takes_the_least_loaded_candidate(tensors: list[tuple[object, int]]) -> None:
    """Told again without a heap."""
    sent: dict[tuple[bool, int], int] = {}
    for (route, size), chosen in zip(tensors, choices("balanced", *tensors), strict=True):
        for demand, sender in zip(route.demands, chosen, strict=True):
            is_near = bool(demand.near_owners)
            candidates = demand.near_owners or demand.owners
            loads = [(sent.get((is_near, rank), 0), rank) for rank in candidates]
            assert sender == min(loads)[1]
            sent[is_near, sender] = sent.get((is_near, sender), 0) + size
