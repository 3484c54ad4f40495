# SPDX-License-Identifier: Apache-2.0
"""The quickstart's parts: schedule and commands, instrument, report, and how it runs its stages."""

import copy
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.distributed import REPOSITORY
from tests.support.presets import LAYOUTS, toy_gpt
from tests.support.pretrain import run_pretrain
from tests.support.processes import is_running
from tests.support.waiting import until

FOLDER = REPOSITORY / "examples" / "quickstart"


def load(name: str) -> ModuleType:
    """Import one of the quickstart's files, which are not a package, under a name that nothing else has."""
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(FOLDER))
    settings, report, stages = load("settings"), load("report"), load("stages")

# Schedule and commands.


@given(st.integers(min_value=settings.LEAST_ITERATIONS, max_value=10_000))
def test_any_schedule_ends_with_a_round_and_saves_in_the_middle_of_an_interval(iterations: int) -> None:
    schedule = settings.Schedule(iterations=iterations)
    local = iterations - schedule.warmup
    assert schedule.warmup >= 1 and schedule.rounds >= 3
    assert local == schedule.rounds * schedule.interval
    saved_after = schedule.checkpoint - schedule.warmup
    assert saved_after % schedule.interval != 0
    # A momentum of the outer optimizer exists, and what was saved takes part in two rounds.
    assert saved_after > schedule.interval
    assert schedule.rounds - saved_after // schedule.interval == 2


def test_by_default_every_evaluation_follows_a_round_so_that_it_sees_the_newest_weights() -> None:
    schedule = settings.Schedule(iterations=settings.DEFAULT_ITERATIONS)
    evaluations = range(schedule.evaluation, schedule.iterations + 1, schedule.evaluation)
    assert len(evaluations) >= 3
    assert all((iteration - schedule.warmup) % schedule.interval == 0 for iteration in evaluations)
    # One more comes at the end by itself.
    assert schedule.iterations not in evaluations


def test_a_run_that_is_too_short_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"--iterations is 11; it must be at least 12"):
        settings.Schedule(iterations=11)


@pytest.mark.parametrize(
    ("backend", "gpus", "expected"),
    [
        ("auto", 0, ("cpu", 4)),
        ("auto", 1, ("cpu", 4)),
        ("auto", 3, ("cuda", 2)),
        ("auto", 8, ("cuda", 4)),
        ("cpu", 8, ("cpu", 4)),
        ("cuda", 2, ("cuda", 2)),
    ],
)
def test_gpus_are_used_where_every_worker_has_one(backend: str, gpus: int, expected: tuple[str, int]) -> None:
    machine = settings.choose_machine(backend, gpus)
    assert (machine.backend, machine.processes) == expected


def test_cuda_without_enough_gpus_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"--backend cuda needs 2 GPUs.* torch sees 1"):
        settings.choose_machine("cuda", 1)


def test_the_runs_differ_in_nothing_but_local_sgd_and_checkpoints(tmp_path: Path) -> None:
    quickstart = settings.Quickstart(
        output=tmp_path,
        schedule=settings.Schedule(iterations=26),
        machine=settings.choose_machine("cpu", 0),
    )

    def without_record(command: list[str]) -> list[str]:
        return [word for word in command if not word.startswith(str(tmp_path / "records"))]

    synchronous = without_record(quickstart.synchronous())
    assert not [word for word in synchronous if "local-sgd" in word or "outer" in word]
    for command in (quickstart.local_sgd(), quickstart.resumed()):
        words = without_record(command)
        assert words[: len(synchronous)] == synchronous
        more = words[len(synchronous) :]
        assert more[0] == "--use-local-sgd"
        others = {"--save", "--save-interval", "--load", "--ckpt-step"}
        options = {word for word in more if word.startswith("--")} - others
        assert all(option.startswith(("--local-sgd-", "--outer-", "--use-local-sgd")) for option in options)


# Instrument.

_attached: list[Any] = []


def attach() -> None:
    """Attach the recorder in a rank, with every rank a worker of its own."""
    sys.path.insert(0, str(FOLDER))
    recorder = load("recorder").Recorder(workers=int(os.environ["WORLD_SIZE"]))
    recorder.attach()
    _attached.append(recorder)


def recorded(_model: Any, _optimizer: Any, _args: Any) -> dict[str, Any]:
    """Return what the recorder saw until training ended."""
    recorder = _attached[-1]
    return {
        **vars(recorder.record),
        "losses": [float(loss) for loss in recorder._losses],
        "evaluations": [(at, float(loss)) for at, loss in recorder._evaluations],
    }


UNITS = ("embedding", "layer 0", "layer 1", "final norm")
LOCAL_SGD = {"use_local_sgd": True, "local_sgd_workers": 2, "local_sgd_sync_interval": 3}
ONLY_IF_ASKED = {"log_interval": 1000, "eval_interval": 2, "eval_iters": 1, "train_iters": 6}


@pytest.mark.parametrize("local_sgd", [{}, LOCAL_SGD], ids=["synchronous", "local-sgd"])
def test_the_instrument_changes_no_bit(local_sgd: dict[str, Any]) -> None:
    arguments = toy_gpt(LAYOUTS["dp2"].options, local_sgd, train_iters=6)
    plain = run_pretrain(arguments, 2)
    measured = run_pretrain(arguments, 2, before=attach, probe=recorded)
    for one, other in zip(plain, measured, strict=True):
        assert (one.parameters, one.optimizer) == (other.parameters, other.optimizer)
        assert one.losses == other.losses == other.probe["losses"]


def test_a_synchronous_run_sends_its_gradients_at_every_iteration() -> None:
    ranks = run_pretrain(toy_gpt(LAYOUTS["dp2"].options, ONLY_IF_ASKED), 2, before=attach, probe=recorded)
    for rank in ranks:
        gradients = 4 * rank.probe["parameters"]
        # The loss of the batch, the verdict on the update and the like: a few numbers more.
        assert all(gradients <= count < gradients + 100 for count in rank.probe["crossing_bytes"])
        assert len(rank.probe["crossing_bytes"]) == 6


def test_local_sgd_sends_as_much_only_in_rounds(tmp_path: Path) -> None:
    arguments = toy_gpt(
        LAYOUTS["dp2"].options, LOCAL_SGD, ONLY_IF_ASKED, save=str(tmp_path / "checkpoints"), save_interval=5
    )
    ranks = run_pretrain(arguments, 2, before=attach, probe=recorded)
    for rank in ranks:
        seen = rank.probe
        pseudo_gradients = 4 * seen["parameters"]
        first, second, third, *others = seen["crossing_bytes"]
        # The first iteration checks that the workers are equal, and is logged.
        assert 0 < first < 100
        assert (second, others[0], others[1]) == (0, 0, 0)
        # A number to meet by; the squared norms of two workers and of their mean in fp64, by unit: summed, then made
        # equal; and the same with the cosine's two numbers.
        about_the_round = 4 + 2 * 3 * len(UNITS) * 8 + 2 * 2 * 8
        assert third == others[2] == pseudo_gradients + about_the_round
        assert [calls > 0 for calls in seen["crossing_calls"]] == [True, False, True, False, False, True]
        assert [len(segment) for segment in seen["segments"]] == [2, 2, 1, 1]
        assert [at for at, _ in seen["evaluations"]] == [2, 4, 6]
        assert seen["weights_digest"] and seen["optimizer_digest"]


# Report.


def record(rank: int, *, first: int = 0, iterations: int = 4) -> dict[str, Any]:
    """Return a rank's record of a run whose losses tell rank and iteration."""
    return {
        "rank": rank,
        "worker": rank // 2,
        "first_iteration": first,
        "losses": [10.0 * rank + at for at in range(first + 1, iterations + 1)],
        "evaluations": [[at, at / 8] for at in (2, 4) if at > first],
        "segments": [[0.5, 0.1 * (rank + 1)], [0.25, 0.25 * (3 - rank)]],
        "crossing_bytes": [0, 100, 0, 100 + rank],
        "crossing_calls": [0, 1, 0, 1],
        "weights_digest": f"w{rank}",
        "optimizer_digest": f"o{rank}",
        "patches": ["cpu/one", "wheel/two", "arguments/three"],
    }


def make_run(**settings: int) -> Any:
    return report.Run(ranks=[record(rank, **settings) for rank in range(4)])


def test_a_runs_losses_are_the_mean_over_ranks_and_its_bytes_their_sum() -> None:
    run = make_run()
    assert run.training == [(1, 16.0), (2, 17.0), (3, 18.0), (4, 19.0)]
    assert run.final_training_loss(2) == 18.5
    assert run.crossing_bytes == [0, 400, 0, 406]
    summary = run.summary(2, 1)
    assert summary["cross_worker_bytes_per_iteration"] == 806 / 4
    assert summary["cross_worker_bytes_per_iteration_after_warmup"] == 806 / 3
    assert summary["iterations_with_cross_worker_traffic"] == 2
    assert summary["final_validation_loss"] == 0.5
    assert summary["patches"] == {"backend": 2, "options": 1, "training": 0}


def test_an_iterations_time_is_that_of_the_slowest_rank_without_the_first_iteration() -> None:
    # First stretch: 0.4 s of rank 3 for one iteration; second: 0.25 + 0.75 s of rank 0 for two.
    assert make_run().ms_per_iteration() == pytest.approx(1000 * 1.4 / 3)


def test_an_equal_continuation_has_no_differences() -> None:
    assert report.resumed_differences(make_run(), make_run(first=2)) == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("losses", [33.0, 34.000001], "rank 3: training loss of iteration 4: 34.0 and 34.000001"),
        ("losses", [33.0], "rank 3: 1 iterations instead of 2"),
        ("losses", [], "rank 3: 0 iterations instead of 2"),
        ("evaluations", [[4, 0.50001]], "rank 3: validation losses"),
        ("evaluations", [], "rank 3: validation losses"),
        ("weights_digest", "other", "rank 3: weights digest w3 and other"),
        ("optimizer_digest", "", "rank 3: optimizer digest o3 and "),
    ],
)
def test_any_difference_of_a_continuation_is_found_and_named(name: str, value: Any, words: str) -> None:
    resumed = make_run(first=2)
    resumed.ranks[3] = {**copy.deepcopy(resumed.ranks[3]), name: value}
    differences = report.resumed_differences(make_run(), resumed)
    assert len(differences) == 1
    assert differences[0].startswith(words)


# Stages.


def test_a_failing_stage_stops_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "stage.log"
    code = "import sys\nfor n in range(100): print('line', n)\nprint('the reason', file=sys.stderr)\nsys.exit(1)"
    with pytest.raises(stages.StageError) as failure:
        stages.run_stage([sys.executable, "-c", code], log)
    message = str(failure.value)
    assert "exit status 1" in message and str(log) in message
    assert "the reason" in message and "line 90" in message and "line 10\n" not in message
    assert "line 10\n" in log.read_text()


def test_the_end_of_a_log_is_what_the_ranks_wrote_not_torchruns_report(tmp_path: Path) -> None:
    log = tmp_path / "stage.log"
    report = "W0101 10:00:00.000000 100 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process"
    log.write_text("\n".join(["start", "[rank1]: KeyError: " + "x" * 5000, report, *["Traceback"] * 60]))
    assert stages.log_tail(log) == ["start", "[rank1]: KeyError: " + "x" * 281]


def test_a_stage_ends_with_the_quickstart_even_when_that_is_killed(tmp_path: Path) -> None:
    child = tmp_path / "child"
    sleeper = f"import os, time; print(os.getpid(), file=open({str(child)!r}, 'w'), flush=True); time.sleep(300)"
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import stages, pathlib\n"
    code += f"stages.run_stage([sys.executable, '-c', {sleeper!r}], pathlib.Path({str(tmp_path / 'log')!r}))"
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: child.exists() and child.read_text() != "", "the process that sleeps", 30.0)
        pid = int(child.read_text())
        assert is_running(pid)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    until(lambda: not is_running(pid), f"the end of process {pid}", 30.0)


def test_a_stage_starts_beside_threads_of_grpc(tmp_path: Path) -> None:
    """With a `preexec_fn`, one start in fifty died of SIGABRT: gRPC's poller lives on in a forked process."""
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import stages, pathlib, grpc\n"
    code += "from concurrent.futures import ThreadPoolExecutor\n"
    code += "server = grpc.server(ThreadPoolExecutor(2)); port = server.add_insecure_port('127.0.0.1:0')\n"
    code += "server.start(); channel = grpc.insecure_channel(f'127.0.0.1:{port}')\n"
    code += "grpc.channel_ready_future(channel).result(60)\n"
    code += f"for n in range(150): stages.run_stage(['/bin/true'], pathlib.Path({str(tmp_path / 'log')!r}))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_command_that_is_none_fails_as_a_stage(tmp_path: Path) -> None:
    with pytest.raises(stages.StageError, match=r"exit status 1; .*\n +/no/such: No such file or directory"):
        stages.run_stage(["/no/such"], tmp_path / "log")


def test_megatrons_log_becomes_a_few_words() -> None:
    line = (
        " [2026-01-01 00:00:00.000000] iteration       20/     260 | consumed samples:          320 | "
        "elapsed time per iteration (ms): 416.4 | learning rate: 3.000000E-04 | global batch size:    16 | "
        "lm loss: 3.070826E+00 | loss scale: 1.0 | grad norm: 0.928 | outer round: 3 | workers: 2/2 |"
    )
    shown = stages.progress(line)
    expected = "iteration 20/260 training loss 3.071 416 ms per iteration outer rounds so far: 3"
    assert re.sub(" +", " ", shown) == expected
    assert "outer" not in stages.progress(line.partition(" outer round")[0])
    validation = " validation loss at iteration 60 | lm loss value: 2.601357E+00 | lm loss PPL: 1.348E+01 | "
    assert stages.progress(validation) == "validation loss at iteration 60: 2.601"
    assert stages.progress("Evaluating iter 1/8") is None


def test_an_output_folder_is_new_or_empty_or_that_of_the_same_quickstart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    entry = load("entry")
    entry.claim(tmp_path / "new" / "one", ".mine")
    (tmp_path / "new" / "one" / "result").touch()
    entry.claim(tmp_path / "new" / "one", ".mine")
    (tmp_path / "empty").mkdir()
    entry.claim(tmp_path / "empty", ".mine")
    assert (tmp_path / "empty" / ".mine").exists()
    for other in (tmp_path / "new" / "one", tmp_path / "new", tmp_path / "empty" / ".mine"):
        with pytest.raises(ValueError, match=r"something else than a quickstart's output; give a new folder"):
            entry.claim(other, ".another")
    assert not list(tmp_path.rglob(".another"))
    for nowhere, why in (("/proc/none", "No such file"), (tmp_path / "empty" / ".mine" / "in", "Not a directory")):
        with pytest.raises(ValueError, match=f"--output {nowhere}: cannot be written: {why}.*give another folder"):
            entry.claim(Path(nowhere), ".mine")
