# SPDX-License-Identifier: Apache-2.0
"""A run that is over, what is in its folder, and what a journal can lose."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.cli.main import main
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.rounds.journal import Journal
from tests.sync_service.service import Service
from tests.sync_service.whole_runs import ROUNDS

CONFIG = RunConfig(peers=2, outer_optimizer="sgd", outer_optimizer_lr=0.7)


def run_to_the_end(service: Service, **options: Any) -> None:
    service.start()
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, seed=7, **options) for index in range(2)]
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    end(service)


def end(service: Service) -> None:
    assert service.server is not None
    service.server.kill()
    service.server.wait()


def folder_of(service: Service) -> Path:
    return service.state / "runs/demo"


def contents(folder: Path) -> dict[str, bytes]:
    """Return what is in the files of a run's folder, by their paths."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rounds_in(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("round-")) for path in (folder / "snapshots").glob("*.safetensors"))


def newest_round(service: Service, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    assert main(["server", "status", "--json", "--server", service.address]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    return run["newest_round"], run["digest"]


def refused_recovery(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    capsys.readouterr()
    before = contents(folder)
    assert main(["server", "recover", str(folder), *flags]) == 2
    after = contents(folder)
    assert {**after, "lock": b""} == {**before, "lock": b""}
    return capsys.readouterr().err


def gone(journal: Path, chance: random.Random) -> None:
    journal.unlink()


def emptied(journal: Path, chance: random.Random) -> None:
    os.truncate(journal, 0)


def cut_at_a_line(journal: Path, chance: random.Random) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: chance.randrange(len(lines))]))


def cut_in_a_line(journal: Path, chance: random.Random) -> None:
    os.truncate(journal, chance.randrange(journal.stat().st_size))


def older_copy(journal: Path, chance: random.Random) -> None:
    """What a copy has that was made before the last round, and a server that was started with it has continued."""
    lines = journal.read_bytes().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if b'"committed"' in line)
    journal.write_bytes(b"".join(lines[: chance.randrange(2, last - 1)]))
    found = Journal(journal)
    found.append({"event": "started"})
    found.close()


def without_its_last_round(journal: Path, chance: random.Random) -> None:
    """What is left when the line that commits the newest round, and what may follow it, is lost."""
    lines = journal.read_bytes().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if b'"committed"' in line)
    torn = lines[last][: chance.randrange(len(lines[last]))]
    journal.write_bytes(b"".join(lines[:last]) + torn)


LOSSES = [gone, emptied, cut_at_a_line, cut_in_a_line, older_copy, without_its_last_round]
DRAWN = [cut_at_a_line, cut_in_a_line, older_copy, without_its_last_round]


def kinds(line: bytes) -> tuple[str, int | None]:
    event = json.loads(line)
    return event["event"], event.get("round")
