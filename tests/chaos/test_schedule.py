# SPDX-License-Identifier: Apache-2.0
"""Faults: the same ones for a seed, shrunk to those that matter, and refused where they cannot happen."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from tests.chaos.schedule import KINDS, Fault, draw, read_schedule, server_names, shrink, write_schedule
from tests.chaos.settings import Settings

PEERS = ("p0", "p1", "p2")


def test_a_seed_is_a_schedule_and_settings_and_another_seed_others():
    first = draw(5, seconds=600, faults_per_hour=600, peers=PEERS)
    assert first == draw(5, seconds=600, faults_per_hour=600, peers=PEERS)
    assert first != draw(6, seconds=600, faults_per_hour=600, peers=PEERS)
    assert Settings.of_seed(5) == Settings.of_seed(5)
    assert {fault.kind for fault in draw(5, seconds=36_000, faults_per_hour=600, peers=PEERS)} == set(KINDS)


def test_each_of_two_servers_is_struck_and_only_the_first_has_a_journal():
    faults = draw(5, seconds=36_000, faults_per_hour=600, peers=PEERS, servers=server_names(2))
    struck = {kind: {fault.target for fault in faults if fault.kind == kind} for kind in KINDS}
    assert struck["server killed"] == struck["bit flip in the snapshot"] == {"server", "shard1"}
    assert struck["bit flip in the journal"] == {"server"}


@given(seed=st.integers(0, 10_000))
def test_no_fault_begins_where_another_one_is_and_all_are_over_in_time(seed: int):
    busy: dict[str, float] = {}
    for fault in draw(seed, seconds=120, faults_per_hour=3600, peers=PEERS):
        assert fault.at >= busy.get(fault.target, 0.0) - 0.02  # both are rounded
        busy[fault.target] = fault.at + fault.seconds
        assert busy[fault.target] <= 120.02


def test_ten_minutes_at_sixty_an_hour_have_about_ten():
    counts = [len(draw(seed, seconds=600, faults_per_hour=60, peers=PEERS)) for seed in range(200)]
    assert 9 < sum(counts) / len(counts) < 10.5


def test_a_seed_into_whose_time_no_fault_fits_is_refused():
    with pytest.raises(UserError, match=r"--seed 5: no fault fits into 0\.01 minutes at 60 an hour; raise --minutes"):
        draw(5, seconds=0.6, faults_per_hour=60, peers=PEERS)


@given(st.data())
def test_shrinking_keeps_what_a_failure_needs_and_little_else(data: st.DataObject):
    faults = draw(data.draw(st.integers(0, 100)), seconds=300, faults_per_hour=600, peers=PEERS)
    needed = data.draw(st.lists(st.sampled_from(faults), min_size=1, max_size=3, unique=True))
    tried: list[Sequence[Fault]] = []

    def fails(fewer: Sequence[Fault]) -> bool:
        tried.append(fewer)
        return set(needed) <= set(fewer)

    assert set(shrink(faults, fails, tries=10_000)) == set(needed)
    few = shrink(faults, fails, tries=3)
    assert set(needed) <= set(few)


def test_shrinking_makes_no_more_runs_than_it_may():
    faults = draw(1, seconds=600, faults_per_hour=600, peers=PEERS)
    tried = []
    shrink(faults, lambda fewer: bool(tried.append(fewer)), tries=7)
    assert len(tried) == 7


def test_a_schedule_is_read_as_it_was_written(tmp_path: Path):
    faults = draw(1, seconds=60, faults_per_hour=600, peers=PEERS)
    write_schedule(tmp_path / "faults", faults)
    assert read_schedule(tmp_path / "faults", seconds=60, peers=PEERS) == faults


GOOD = Fault(kind="server killed", at=1.0, seconds=1.0, target="server", dice=1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kind": "flood"}, "kind is 'flood'; use one of server killed"),
        ({"target": "p1"}, "target is 'p1'; 'server killed' strikes server"),
        ({"kind": "peer killed", "target": "p3"}, "target is 'p3'; 'peer killed' strikes p0, p1, p2"),
        ({"at": 59.5}, "it lasts until second 60.5, but the run has 60 for faults; raise --minutes"),
        ({"at": -1.0}, "it lasts until second 0"),
        ({"at": float("nan")}, "it lasts until second nan"),
        ({"when": 3}, "'when' is not a field of a fault; give kind, at, seconds, target, dice"),
        ({"at": "1"}, "at is '1'; give a number of seconds"),
        ({"seconds": True}, "seconds is True; give a number of seconds"),
        ({"kind": ["a"]}, "kind is ['a']; give a text"),
    ],
    ids=str,
)
def test_a_line_that_cannot_be_a_fault_of_this_run_is_named(tmp_path: Path, change: dict, problem: str):
    path = tmp_path / "faults"
    path.write_text("".join(json.dumps(line) + "\n" for line in (asdict(GOOD), asdict(GOOD) | change)))
    with pytest.raises(UserError, match="line 2") as caught:
        read_schedule(path, seconds=60, peers=PEERS)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\xff\xfe", "is not text; give a file"),
        (b"{}", "line 1: 'kind' is not given, 'at' is not given"),
        (b"[1]", "line 1: is [1]; give an object with kind, at"),
        (b"{", "line 1 is not JSON; give a file"),
    ],
    ids=["bytes", "empty", "list", "torn"],
)
def test_a_file_without_faults_is_named(tmp_path: Path, content: bytes, problem: str):
    path = tmp_path / "faults"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_schedule(path, seconds=60, peers=PEERS)
    assert str(caught.value).startswith(f"--schedule {path}: {problem}")
