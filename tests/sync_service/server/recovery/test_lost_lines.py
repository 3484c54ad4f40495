# SPDX-License-Identifier: Apache-2.0
"""A journal that is gone, empty or cut: the newest round is kept, or the server does not start and changes nothing."""

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.sync_service.disk.snapshot_names import snapshot_name
from megatron_ext.sync_service.rounds.journal import Journal
from megatron_ext.sync_service.server.store import RunStore
from tests.support.every_run import one_of_each
from tests.support.waiting import until
from tests.sync_service.server.recovery.lost_journals import (
    CONFIG,
    DRAWN,
    LOSSES,
    contents,
    end,
    folder_of,
    newest_round,
    rounds_in,
    run_to_the_end,
    without_its_last_round,
)
from tests.sync_service.service import Service, Zygote
from tests.sync_service.whole_runs import DILOCO, ROUNDS, check_history

MakeService = Callable[..., Service]
TRIALS = [
    *((lose, 0) for lose in LOSSES),
    *((lose, seed) for lose in DRAWN for seed in (1, 2)),
    *(pytest.param(lose, seed, marks=pytest.mark.slow) for lose in DRAWN for seed in range(3, 12)),
]


@pytest.mark.parametrize(("lose", "seed"), TRIALS)
def test_whatever_is_lost_of_a_journal_the_server_keeps_its_newest_round_or_refuses_to_start_and_changes_nothing(
    service: Service,
    undisturbed: list[str],
    capsys: pytest.CaptureFixture[str],
    lose: Callable[[Path, random.Random], None],
    seed: int,
):
    folder = folder_of(service)
    lose(folder / "journal.jsonl", random.Random(seed))
    before = contents(folder)
    server = service.start()
    if server.exit_code is not None:
        assert server.exit_code == 2 and "Traceback" not in service.output
        (said,) = (line for line in service.output.splitlines() if "error:" in line)
        for word in (str(folder), snapshot_name(ROUNDS), "journal", f"megatron-ext server recover {folder}"):
            assert word in said
        assert contents(folder) == before
        assert main(["server", "recover", str(service.state)]) == 0
        said = capsys.readouterr().out
        assert f"run demo: recovered at round {ROUNDS}, whose digest is {undisturbed[ROUNDS]}" in said
        service.start()
    assert newest_round(service, capsys) == (ROUNDS, undisturbed[ROUNDS])
    assert rounds_in(folder) == [ROUNDS - 1, ROUNDS]


def test_a_journal_cut_anywhere_is_explained_again_by_the_newest_snapshot(finished: Service, tmp_path: Path):
    content = (folder_of(finished) / "journal.jsonl").read_bytes()
    ends = [0]
    for line in content.splitlines(keepends=True):
        ends += [ends[-1] + len(line) // 2, ends[-1] + len(line)]
    refused = 0
    for number, size in enumerate(ends):
        folder = tmp_path / str(number)
        shutil.copytree(folder_of(finished), folder)
        os.truncate(folder / "journal.jsonl", size)
        before = contents(folder)
        try:
            store = RunStore("demo", CONFIG, folder, 2)
        except UserError:
            refused += 1
            assert contents(folder) == before
            assert main(["server", "recover", str(folder)]) == 0
            store = RunStore("demo", CONFIG, folder, 2)
        store.close()
        assert sorted(store.shard.snapshots) == rounds_in(folder) == [ROUNDS - 1, ROUNDS]
        # By index: which of the two registered first is chance.
        assert {member.index: member.name for member in store.state.members.values()} == {0: "p0", 1: "p1"}
    assert 0 < refused < len(ends)


@pytest.fixture(scope="module")
def usual(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """Return by codec what peers see whose server loses nothing."""
    found = {}
    for codec in ("fp32", "int8"):
        service = Service(zygote, tmp_path_factory.mktemp(codec), {"demo": {"peers": 2, **DILOCO}})
        run_to_the_end(service, codec=codec)
        found[codec] = digests_seen(service)
    yield found


def digests_seen(service: Service) -> list[str]:
    found = [[seen["digest"] for seen in service.seen(f"p{index}").values()] for index in range(2)]
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("lose", LOSSES)
@pytest.mark.parametrize("codec", one_of_each(["fp32", "int8"], {1}))
def test_peers_resume_at_a_recovered_server_with_the_bits_that_they_would_have_had(
    make_service: MakeService, usual: dict[str, list[str]], lose: Callable[[Path, random.Random], None], codec: str
):
    service = make_service(**DILOCO)
    service.start()
    options: dict[str, Any] = {"seed": 7, "codec": codec, "pauses": {"3": 1.5}}
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, **options) for index in range(2)]
    until(lambda: len(service.events("committed")) == 3, "round 2")
    end(service)
    lose(folder_of(service) / "journal.jsonl", random.Random(1))
    if service.start().exit_code is not None:
        assert main(["server", "recover", str(service.state)]) == 0
        service.start()
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    assert digests_seen(service) == usual[codec]
    rounds = [event["round"] for event in service.events("committed")]
    assert rounds == sorted(set(rounds)) and rounds[-1] == ROUNDS


def test_a_round_whose_line_was_lost_is_committed_once_with_all_that_it_counts(service: Service):
    journal = folder_of(service) / "journal.jsonl"
    whole = service.journal()
    without_its_last_round(journal, random.Random(0))
    service.start()
    again = service.journal()

    def told(event: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in event.items() if key not in ("time", "crc")}

    assert list(map(told, again[: len(whole)])) == list(map(told, whole))
    check_history(service, ROUNDS)


def test_a_contribution_that_is_asked_for_once_more_leaves_the_round_open_whose_snapshot_is_there(service: Service):
    folder = folder_of(service)
    without_its_last_round(folder / "journal.jsonl", random.Random(0))
    journal = Journal(folder / "journal.jsonl")
    journal.append({"event": "forgotten", "round": ROUNDS, "peer": "p0", "reason": "it is damaged"})
    journal.close()
    (folder / f"spool/round-{ROUNDS + 1:08d}").rename(folder / f"spool/round-{ROUNDS:08d}")
    service.start()
    assert [event["round"] for event in service.events("committed")] == list(range(ROUNDS))
    assert rounds_in(folder) == [ROUNDS - 2, ROUNDS - 1, ROUNDS][-len(rounds_in(folder)) :]
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, seed=7) for index in range(2)]
    assert [peer.wait() for peer in peers] == [0, 0]
    check_history(service, ROUNDS)


def test_a_server_killed_before_the_line_of_a_round_commits_it_at_its_next_start(
    make_service: MakeService,
    undisturbed: list[str],
):
    service = make_service(**DILOCO)
    server = service.start("snapshot_renamed:3")
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, seed=7) for index in range(2)]
    assert server.wait() == -signal.SIGKILL
    assert len(service.events("committed")) == 2
    made = (folder_of(service) / "snapshots" / snapshot_name(2)).read_bytes()
    service.start()
    assert [event["digest"] for event in service.events("committed")] == undisturbed[:3]
    assert (folder_of(service) / "snapshots" / snapshot_name(2)).read_bytes() == made
    assert [peer.wait() for peer in peers] == [0, 0]
    assert [event["digest"] for event in service.events("committed")] == undisturbed
