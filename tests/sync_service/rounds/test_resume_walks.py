# SPDX-License-Identifier: Apache-2.0
"""The rule by which peers resume, over a run in which everything ends at any time: peers, rounds, and the server."""

import random

import pytest

from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.protocol.resuming import Adopt, Continue, Refuse, ResumeAnswer, Wait
from megatron_ext.sync_service.rounds import round as round_of_run
from tests.sync_service.rounds import resume_check
from tests.sync_service.rounds.resume_history import Job, Process
from tests.sync_service.rounds.resume_world import World

FAULTS = (*["crash"] * 12, "evict", "leave")
FAULTS_OF_SERVER = ("forget", "forget", "restart_server", "save_backup", "restore_backup")


def next_of(process: Process | None, dice: random.Random) -> str:
    """Return what a peer does next if nothing happens to it."""
    if process is None:
        return "begin"
    if process.claim is not None:
        return "ask"
    if process.in_flight is not None:
        return dice.choice(["step", "apply"])
    if dice.random() < 0.15:
        return "save"
    return "upload" if process.done >= process.length else "step"


def walk(seed: int, length: int) -> World:
    """Let things happen at random."""
    dice = random.Random(seed)
    world = World(
        is_asynchronous=dice.random() < 0.5,
        quorum=dice.choice([1, 2]),
        staleness=dice.choice([None, 1]),
        delay=dice.choice([0, 1]),
        by_time=dice.random() < 0.25,
        job=Job(workers=dice.choice([1, 2]), ranks=dice.choice([1, 2]), is_lossy=dice.random() < 0.5),
    )
    share = 0.5
    for count in range(length):
        if count % 60 == 0:
            share = dice.choice([0.5, 0.5, 0.5, 0.02, 0.98])  # now and then one of the two stands still for a while
        index, kind = int(dice.random() < share), dice.random()
        if kind < 0.02:
            verb, places = dice.choice(FAULTS_OF_SERVER), tuple[int, ...]()
        elif kind < 0.2:
            verb, places = dice.choice(["close", "commit"]), ()
        else:
            verb = dice.choice(FAULTS) if kind < 0.26 else next_of(world.processes[index], dice)
            places = (index,)
        try:
            getattr(world, verb)(*places, dice.randrange(1 << 10))
        except Refusal as refusal:
            assert refusal.reason == "later", refusal  # an earlier contribution is not used yet
    return world


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_whatever_ends_no_sample_counts_twice_and_no_fault_loses_more_than_an_interval(
    first: int, monkeypatch: pytest.MonkeyPatch
):
    if first % 200:
        # What became of a contribution is forgotten within a walk.
        for module in (round_of_run, resume_check):
            monkeypatch.setattr(module, "KEPT_RESULTS", 3)
    answers: list[ResumeAnswer] = []
    for seed in range(first, first + 100):
        try:
            answers += walk(seed, 1500).answers
        except AssertionError as error:
            raise AssertionError(f"walk {seed}: {error}") from error
    # What is to be seen is there.
    for kind in (Wait, Adopt, Refuse):
        assert sum(isinstance(answer, kind) for answer in answers) > 20, kind
    for send in (True, False):
        assert sum(isinstance(answer, Continue) and answer.send == send for answer in answers) > 20, send
