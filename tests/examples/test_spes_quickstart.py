# SPDX-License-Identifier: Apache-2.0
"""examples/spes/quickstart.sh: its peers train, it kills and starts what it says, and it understands what they log."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.corpus import make
from tests.support.distributed import REPOSITORY
from tests.support.pretrain import run_pretrain
from tests.support.processes import SESSION_MARK, session_processes
from tests.sync_service.service import Service

SCRIPT = REPOSITORY / "examples" / "spes" / "quickstart.sh"
SHORT = {
    "--num-layers": "1",
    "--hidden-size": "32",
    "--ffn-hidden-size": "32",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--train-iters": "4",
    "--eval-interval": "2",
    "--eval-iters": "1",
}


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("spes_quickstart", SCRIPT.with_suffix(".py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_peers_train_and_their_logs_and_the_journal_are_understood(
    tmp_path: Path,
    quickstart: ModuleType,
    make_service: Callable[..., Service],  # the fixture
) -> None:
    plan = quickstart.Plan(output=tmp_path, schedule=quickstart.Schedule(iterations=100))
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text("x = 1\n" * 60)
    make(tmp_path / "text", plan.corpus)
    service = make_service({"spes": {"peers": 4, "sync_steps": 2, "merge_interval": 4, "merge_alpha_start": 0.5}})
    service.start()

    def train(peer: int) -> Any:
        words = plan.peer(peer, service.address)
        words = words[words.index(str(REPOSITORY / "examples" / "pretrain_gpt.py")) + 1 :]
        for flag, value in SHORT.items():
            words[words.index(flag) + 1] = value
        save = words.index("--save")
        del words[save : save + 4]
        (rank,) = run_pretrain([*words, "--sync-service-interval", "2"], 1)
        found = quickstart.Peer(name=f"node{peer}")
        for line in rank.stdout.splitlines():
            found.read_line(line)
        return found

    with ThreadPoolExecutor(4) as pool:
        peers = list(pool.map(train, range(4)))
    for peer in peers:
        assert list(peer.losses) == [1, 2, 3, 4] and list(peer.validation) == [2, 4] and not peer.repeated
        assert list(peer.traffic) == [1, 2]
    rounds = quickstart.Rounds.read(service.state / "runs/spes/journal.jsonl")
    assert sorted(rounds.uploaded(1)) == ["node0", "node1", "node2", "node3"]
    summary = quickstart.summarize(peers, rounds, plan.ownership, 2)
    model = summary["full_fp32_mb_both_ways"] / 2
    for peer in summary["peers"]:
        assert (peer["gradient_bytes"], peer["optimizer_bytes"]) == (
            peer["theory_gradient_bytes"],
            peer["theory_optimizer_bytes"],
        )
        assert peer["gradient_bytes"] < 0.5 * summary["all_experts"]["gradient_bytes"]
        # What it trains goes up; all but its own experts, a fourth of what is not shared, comes down.
        trained = peer["gradient_bytes"] / 1e6
        assert peer["mb_up"] == pytest.approx(trained, abs=6e-4)
        assert peer["mb_down"] == pytest.approx(model - (model - trained) / 3, abs=6e-4)
        assert peer["mb_down_merged"] == [pytest.approx(model, abs=6e-4)]
        assert peer["validation_loss"] == summary["peers"][0]["validation_loss"]
    text = quickstart.table(summary)
    assert "node3      12-15" in text and "2 rounds, 2 of them with all 4 peers" in text and "1 rounds merged" in text
    quickstart.plot(summary, [{"iteration": 2, "what": "server killed"}], tmp_path / "quickstart.png")
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000


STAND_IN = """
import json, subprocess, sys, time
peer, resume, iterations, interval, journal = json.loads(sys.argv[1])
writes = "import time; 'lm loss'; memory = b'1' * 300_000_000; time.sleep(300)"  # so much memory takes time to go
writer = subprocess.Popen([sys.executable, "-c", writes])
for number in range(36 if resume else 1, iterations + 1):
    if peer == 1 and number == 45 and not resume:
        time.sleep(200)
    time.sleep(0.005)
    made = number // interval
    sent = 2 if made == 3 and peer == 0 else 1
    moved = f" sync round: {made} | peers: 2/2 | sync MB up: {sent}.000 | down: 3.000 |" if made else ""
    print(f" iteration {number:>8}/ {iterations} | lm loss: 1.5E+00 |{moved}", flush=True)
    if number % interval == 0:
        events = [{"event": "uploaded", "round": number // interval, "peer": f"node{peer}"}]
        if peer == 0:
            events.append({"event": "committed", "round": number // interval, "contributors": ["node0", "node1"]})
        with open(journal, "a") as file:
            file.write("".join(json.dumps(event) + "\\n" for event in events))
writer.kill()
"""
LISTENING = "import time; print('listening at 127.0.0.1:5, as pid 7', flush=True); time.sleep(300)"


def stand_in_plan(quickstart: ModuleType, output: Path, stand_in: str = STAND_IN) -> Any:
    """Return a plan whose server and peers only write what the real ones would."""

    @dataclass(frozen=True, kw_only=True)
    class StandIn(quickstart.Plan):
        @property
        def peers(self) -> int:
            return 2

        def server(self, address: str) -> list[str]:
            self.journal.parent.mkdir(parents=True, exist_ok=True)
            return [sys.executable, "-c", LISTENING, address]

        def peer(self, peer: int, address: str, *, resume: bool = False) -> list[str]:
            job = [peer, resume, self.schedule.iterations, self.schedule.interval, str(self.journal)]
            return [sys.executable, "-c", stand_in, json.dumps(job)]

    return StandIn(output=output, schedule=quickstart.Schedule(iterations=100))


def stand_ins() -> list[str]:
    """Return what is left running of them."""
    found = session_processes(os.environ[SESSION_MARK])
    return [process.command for process in found if "lm loss" in process.command or "listening at" in process.command]


def test_a_peer_and_the_server_are_killed_and_started_again_and_nothing_is_left(
    tmp_path: Path, quickstart: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "DOWN_SECONDS", 0.1)
    with quickstart.Story.begin(stand_in_plan(quickstart, tmp_path)) as story:
        story.play()
        assert stand_ins()
    assert not stand_ins()
    peer, server = story.events
    assert peer["what"] == "node1 killed" and 40 <= peer["iteration"] < 45
    assert f"after iteration {peer['iteration']} and resumed from its checkpoint of iteration 35" in peer["text"]
    assert story.peers[1].repeated == list(range(36, peer["iteration"] + 1))
    assert len(story.peers[1].losses) == 100
    assert server["what"] == "server killed" and server["round"] == 3
    assert "2 peers counted in that round. node0 had to upload again:\n    2.00 MB" in server["text"]
    assert "iteration  100/100   training losses: node0 1.500  node1 1.500" in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["error", "ctrl-c"])
def test_no_process_is_left_when_a_peer_fails_or_it_is_ended(
    tmp_path: Path, quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    if ending == "ctrl-c":

        def end(_story: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(quickstart.Story, "_kill_peer", end)
        with (
            pytest.raises(KeyboardInterrupt),
            quickstart.Story.begin(stand_in_plan(quickstart, tmp_path)) as story,
        ):
            story.play()
    else:
        failing = STAND_IN.replace("time.sleep(200)", "sys.exit('the reason')")
        failing = failing.replace("number == 45", "number == 5")
        with (
            pytest.raises(quickstart.StageError, match=r"(?s)peer node1 failed with exit status 1.*the reason"),
            quickstart.Story.begin(stand_in_plan(quickstart, tmp_path, failing)) as story,
        ):
            story.play()
    assert not stand_ins()


def test_any_schedule_kills_in_mid_interval_and_the_server_in_a_later_round(quickstart: ModuleType) -> None:
    for iterations in range(100, 2000, 25):
        schedule = quickstart.Schedule(iterations=iterations)
        assert 0 < schedule.checkpoint % 25 < schedule.kill % 25 < 25
        assert schedule.kill // 25 == schedule.checkpoint // 25
        assert schedule.kill // 25 + 1 < schedule.server_round < schedule.rounds
        assert schedule.evaluation % 25 == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"iterations": 75}, "--iterations is 75; it must be a multiple of 25, .* and at least 100"),
        ({"iterations": 110}, "--iterations is 110; it must be a multiple of 25"),
        ({"output": Path(__file__).parent}, "is something else than a quickstart's output; give a new folder"),
    ],
)
def test_bad_values_are_refused(
    tmp_path: Path, quickstart: ModuleType, options: dict[str, Any], complaint: str
) -> None:
    given = {"iterations": 100, "output": tmp_path / "new", **options}
    with pytest.raises(ValueError, match=complaint):
        quickstart.plan_from(argparse.Namespace(**given))


def test_old_results_are_replaced_and_the_corpus_is_kept(tmp_path: Path, quickstart: ModuleType) -> None:
    for name in ("server/journal", "checkpoints/old", "corpus/stdlib.bin", "node0.log", "summary.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    quickstart.remove_old_results(tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["stdlib.bin"]


@pytest.mark.parametrize(
    ("arguments", "backend", "code", "text"),
    [
        (["--itertions", "50"], "cpu", 2, "quickstart.sh: error: unknown argument --itertions (see --help)\n"),
        (["--iterations"], "cpu", 2, "quickstart.sh: error: --iterations needs a value (see --help)\n"),
        ([], "gpu", 2, "BACKEND=gpu: this quickstart has run on CPU only; use BACKEND=cpu (see --help)\n"),
        (["--output", "x", "--help"], "cpu", 0, "--iterations N "),
    ],
    ids=["misspelt", "no-value", "backend", "help"],
)
def test_the_script_answers_without_an_environment(arguments: list[str], backend: str, code: int, text: str) -> None:
    done = subprocess.run(
        [str(SCRIPT), *arguments], capture_output=True, text=True, timeout=20, env={**os.environ, "BACKEND": backend}
    )
    assert done.returncode == code and text in done.stdout + done.stderr
    assert code == 0 or len(done.stderr.splitlines()) == 1


def test_different_weights_at_the_end_are_an_error(quickstart: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart.refuse({"weights_digests": ["a", "a"]}) == 0
    assert "All 2 peers ended with the same bits: SHA-256 a" in capsys.readouterr().out
    assert quickstart.refuse({"weights_digests": ["a", "b"]}) == 1
    assert "the peers ended with different weights: a, b" in capsys.readouterr().err
