# SPDX-License-Identifier: Apache-2.0
"""The sync service keeps its promises under seeded faults; a run without any is what one process works out."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.__main__ import main
from tests.chaos.history import History
from tests.chaos.model import RULES
from tests.chaos.peer import digest_of
from tests.chaos.replay import faultless
from tests.chaos.report import as_table, figures
from tests.chaos.schedule import Fault, draw, read_schedule, write_schedule
from tests.chaos.settings import Settings
from tests.chaos.synthetic import run_synthetic
from tests.chaos.task import Task
from tests.sync_service.service import Zygote

QUICK = {
    "all together in int8": Settings.of_seed(68),
    "asynchronous in fp32": Settings.of_seed(919),
    "two servers and guards": Settings.of_seed(402, shards=2, guarded=True),
    "experts behind TLS": Settings.of_seed(690, experts=True, tls=True),
}
"""With all 16 kinds of faults."""
SEEDS = range(100, 110)


@pytest.mark.parametrize("kind", QUICK)
def test_promises_hold_under_a_dozen_faults(zygote: Zygote, tmp_path: Path, kind: str):
    settings = dataclasses.replace(QUICK[kind], step_seconds=0.02)
    faults = draw(
        settings.seed, seconds=12, faults_per_hour=3600, peers=("p0", "p1", "p2"), servers=settings.servers
    )
    history = run_synthetic(settings, faults, seconds=12, folder=tmp_path, zygote=zygote)
    found = figures(history)
    assert len(history.struck) >= len(faults) > 5
    assert not found["violations"], as_table(found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kind",
    [{}, {"guarded": True}, {"shards": 2}, {"experts": True}, {"experts": True, "shards": 2, "tls": True}],
    ids=str,
)
def test_promises_hold_for_two_minutes(zygote: Zygote, tmp_path: Path, seed: int, kind: dict[str, Any]):
    settings = Settings.of_seed(seed, **kind)
    faults = draw(seed, seconds=120, faults_per_hour=600, peers=("p0", "p1", "p2"), servers=settings.servers)
    history = run_synthetic(settings, faults, seconds=120, folder=tmp_path, zygote=zygote)
    found = figures(history)
    assert not found["violations"], as_table(found)


def test_a_bit_that_flips_in_what_is_encrypted_costs_no_process(zygote: Zygote, tmp_path: Path):
    faults = [
        Fault(kind=f"corrupt frames {way}", at=at, seconds=0.4, target=f"p{at % 3:.0f}", dice=0)
        for at, way in enumerate(("down", "up", "down", "down"))
    ]
    settings = Settings(seed=4, tls=True, step_seconds=0.02)
    found = figures(run_synthetic(settings, faults, seconds=4, folder=tmp_path, zygote=zygote))
    assert found["faults"] == 4 and not found["violations"], as_table(found)


@pytest.mark.slow
def test_a_run_without_faults_ends_where_one_process_does_and_loses_nothing(zygote: Zygote, tmp_path: Path):
    settings = Settings(seed=4, outer_momentum=0.5, step_seconds=0.0)
    history = run_synthetic(settings, (), seconds=3, folder=tmp_path, zygote=zygote)
    found = figures(history)
    assert not found["violations"] and found["intervals_lost"] == 0, as_table(found)
    last = digest_of(faultless(settings, Task(4), history.stop))
    assert {history.said(name, "ends")[0]["digest"] for name in history.names} == {last}


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    faults = [Fault(kind="peer killed", at=0.5, seconds=0.5, target="p1", dice=0)]
    write_schedule(tmp_path / "faults", faults)
    argv = ["--seed", "2", "--minutes", "0.05", "--schedule", str(tmp_path / "faults")]
    assert main([*argv, "--dir", str(tmp_path / "run"), "--json", str(tmp_path / "figures.json")]) == 0
    assert "violations: none" in capsys.readouterr().out
    figures_read = json.loads((tmp_path / "figures.json").read_text())
    assert figures_read["faults"] >= 1 and "peer killed" in figures_read["recovery_seconds"]


@pytest.mark.slow
def test_a_failure_says_its_seed_and_how_it_is_run_again_with_fewer_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    faults = [
        Fault(kind="clock jump", at=0.2, seconds=0.0, target="p0", dice=0),
        Fault(kind="peer killed", at=0.5, seconds=0.5, target="p1", dice=0),
    ]
    write_schedule(tmp_path / "faults", faults)

    def no_kills(history: History) -> Iterator[str]:
        if any(struck.fault.kind == "peer killed" for struck in history.struck):
            yield "there was a kill"

    monkeypatch.setitem(RULES, "no kills", no_kills)
    argv = ["--seed", "2", "--minutes", "0.05", "--schedule", str(tmp_path / "faults"), "--shrink", "3"]
    assert main([*argv, "--dir", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().out
    assert "VIOLATION of 'no kills': there was a kill" in said
    assert "seed 2; 1 of 2 faults" in said and "peer killed" in said
    again = tmp_path / "run" / "schedule.jsonl"
    assert f"again: python -m tests.chaos --seed 2 --minutes 0.05 --schedule {again}" in said
    assert read_schedule(again, seconds=3, peers=("p0", "p1", "p2")) == (faults[1],)
