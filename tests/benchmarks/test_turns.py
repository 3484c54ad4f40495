# SPDX-License-Identifier: Apache-2.0
"""Two sides run by turns: in the order ABBA, and never both at once."""

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.turns import Place, Turns, turn_of
from tests.support.distributed import run_ranks


@given(st.integers(1, 100))
def test_every_turn_belongs_to_one_side_and_the_order_is_abba(blocks):
    sides = {turn_of(block, side): side for block in range(blocks) for side in (0, 1)}
    assert sorted(sides) == list(range(2 * blocks))
    assert [sides[turn] for turn in sorted(sides)] == [[0, 1, 1, 0][turn % 4] for turn in range(2 * blocks)]


def by_turns(log, blocks, iterations):
    """Be one of two processes of side 0, or the one of side 1; log every step."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    side = 0 if rank < 2 else 1
    turns = Turns(Place(port=port, side=side, side_processes=2 - side, processes=3, blocks=blocks))

    def step():
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, str(side).encode())
        os.close(descriptor)

    stepped = turns.around(step, iterations)
    for _ in range(blocks * iterations):
        stepped()
    turns.boundary(blocks)
    return len(turns.seconds)


def test_processes_never_step_in_the_other_sides_turn(tmp_path: Path):
    log = tmp_path / "steps"
    counts = run_ranks(by_turns, 3, str(log), 4, 3)
    assert counts == [4, 4, 4]
    ours, other = "0" * 2 * 3, "1" * 3
    assert log.read_text() == ours + other + other + ours + ours + other + other + ours
