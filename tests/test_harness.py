# SPDX-License-Identifier: Apache-2.0
"""The promises that the test harness makes to all other tests."""

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import distributed
from tests.support.distributed import REPOSITORY, RankFailure, run_ranks
from tests.support.presets import LAYOUTS, command_line, toy_gpt
from tests.support.pretrain import as_worker, run_failing_pretrain, run_pretrain
from tests.support.processes import SESSION_MARK, is_running, session_processes
from tests.support.rank_process import RankJob, rank_main

FOREVER = 1000.0


# Functions that run in ranks ----------------------------------------------------------------------


def _rank() -> int:
    return int(os.environ["RANK"])


def _sum_of_ranks(offset: int) -> tuple[int, float]:
    import torch

    torch.distributed.init_process_group("gloo")
    total = torch.tensor([float(torch.distributed.get_rank() + offset)])
    torch.distributed.all_reduce(total)
    return torch.distributed.get_rank(), float(total)


def _server_threads() -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


def _where_and_what(name: str) -> tuple[str, str | None]:
    return os.getcwd(), os.environ.get(name)


def _one_raises_others_hang() -> None:
    if _rank() == 1:
        print("about to fail")
        raise ValueError("the reason")
    time.sleep(FOREVER)


def _later_rank_raises_first(marker: str) -> None:
    if _rank() == 0:
        while not Path(marker).exists():
            time.sleep(0.01)
        time.sleep(0.15)
    Path(marker).touch()
    raise ValueError(f"raised by rank {_rank()}")


def _one_dies_others_hang() -> None:
    if _rank() == 1:
        if os.fork() == 0:
            time.sleep(FOREVER)  # keeps open what it inherited
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER)


def _function_that_hangs() -> None:
    time.sleep(FOREVER)


def _starts_a_process(seconds: float) -> None:
    subprocess.Popen(["sleep", str(seconds)])


def _hangs_with_a_process() -> None:
    _starts_a_process(FOREVER)
    time.sleep(FOREVER)


def _exits(code: int | str | None) -> None:
    sys.exit(code)


def _store_says() -> str:
    """Ask the store as a rank would, but without rank 0 having made one."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*at, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    return "somebody has come" if store.check(["init/"]) else "nobody has come yet"


def _seed_and_vocabulary(model: Any, optimizer: Any, args: Any) -> tuple[int, int, int]:
    return len(model), args.seed, args.padded_vocab_size


def _announce() -> None:
    print("instrument installed")


def _nothing_is_left() -> bool:
    return not session_processes(os.environ[SESSION_MARK])


# run_ranks ----------------------------------------------------------------------------------------


def test_results_arrive_in_the_order_of_ranks() -> None:
    assert run_ranks(_sum_of_ranks, 3, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]
    assert run_ranks(_sum_of_ranks, 2, offset=1) == [(0, 3.0), (1, 3.0)]


def test_the_server_that_ranks_are_forked_from_has_one_thread() -> None:
    assert run_ranks(_server_threads, 1) == [1]


def test_environment_and_folder_of_the_caller_reach_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SET_AFTER_THE_SERVER_STARTED", "yes")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(_where_and_what, 2, "SET_AFTER_THE_SERVER_STARTED") == [(str(tmp_path), "yes")] * 2


def test_a_failing_rank_is_reported_with_traceback_and_output_while_others_hang() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(_one_raises_others_hang, 3)
    message = str(failure.value)
    assert message.startswith("rank 1 ended with exit code 1")
    assert "in _one_raises_others_hang" in message
    assert "ValueError: the reason" in message
    assert "about to fail" in message
    assert time.monotonic() - start < 10
    assert _nothing_is_left()


def test_the_first_failure_is_the_one_reported(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="raised by rank 1"):
        run_ranks(_later_rank_raises_first, 2, str(tmp_path / "raised"))


def test_a_rank_that_dies_is_reported_with_its_signal() -> None:
    with pytest.raises(RankFailure, match="rank 1 died of SIGKILL"):
        run_ranks(_one_dies_others_hang, 2, timeout=30)
    assert _nothing_is_left()


def test_hanging_ranks_time_out_with_their_stacks() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(_function_that_hangs, 2, timeout=0.5)
    message = str(failure.value)
    assert "timed out after 0.5 s" in message
    assert message.count("in _function_that_hangs") == 2
    assert _nothing_is_left()


def test_a_process_left_behind_by_a_rank_is_an_error_and_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "EXIT_SECONDS", 1.0)
    assert run_ranks(_starts_a_process, 1, 0.3) == [None]
    with pytest.raises(RankFailure, match=r"rank 0 left processes behind: \d+ \(sleep 1000"):
        run_ranks(_starts_a_process, 1, FOREVER)
    assert _nothing_is_left()


def test_an_interrupt_of_the_caller_ends_all_ranks_and_what_they_started() -> None:
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(_hangs_with_a_process, 2)
    assert _nothing_is_left()


def test_ranks_end_themselves_when_the_caller_vanishes(tmp_path: Path) -> None:
    distributed.warm_up()
    job = RankJob(
        rank=0,
        world_size=1,
        master_port=1,
        directory=tmp_path,
        payload=pickle.dumps(partial(_hangs_with_a_process)),
        environment=dict(os.environ),
    )
    context = distributed.CONTEXT
    ours, theirs = context.Pipe()
    process = context.Process(target=rank_main, args=(job, theirs))
    process.start()
    theirs.close()
    time.sleep(0.5)
    assert process.is_alive()
    ours.close()  # what the kernel does for a caller that was killed
    process.join(5)
    assert process.exitcode == -signal.SIGKILL
    assert _nothing_is_left()


def test_the_store_listens_before_any_rank_starts() -> None:
    assert run_ranks(_store_says, 2) == ["nobody has come yet"] * 2


@pytest.mark.parametrize(("code", "exit_code", "stderr"), [("no such file", 1, "no such file\n"), (3, 3, "")])
def test_expected_failures_return_exit_codes_as_a_shell_would_see_them(
    code: int | str, exit_code: int, stderr: str
) -> None:
    exits = run_ranks(_exits, 2, code, expect_failure=True)
    assert [(one.rank, one.exit_code, one.stderr) for one in exits] == [
        (0, exit_code, stderr),
        (1, exit_code, stderr),
    ]


def test_a_rank_that_hangs_beside_an_expected_failure_is_ended() -> None:
    start = time.monotonic()
    hanging, failed = run_ranks(_one_raises_others_hang, 2, expect_failure=True, failure_grace=0.2)
    assert time.monotonic() - start < 30
    assert (hanging.exit_code, failed.exit_code) == (None, 1)
    assert "ValueError: the reason" in failed.stderr


def test_an_expected_failure_that_does_not_come_is_an_error() -> None:
    with pytest.raises(RankFailure, match="a failure was expected"):
        run_ranks(_exits, 2, 0, expect_failure=True)
    assert run_ranks(_exits, 1, None) == [None]


def test_a_function_that_cannot_be_pickled_is_an_error_in_the_caller() -> None:
    with pytest.raises(Exception, match="pickle"):
        run_ranks(lambda: None, 1)


# Presets and run_pretrain -------------------------------------------------------------------------


def test_command_lines_know_bare_flags_dropped_options_and_lists() -> None:
    options = {"bf16": True, "clip_grad": None, "mock_data": False, "split": [90, 10], "lr": 1e-3}
    assert command_line(options) == ["--bf16", "--split", "90", "10", "--lr", "0.001"]
    words = toy_gpt(LAYOUTS["tp2"].options, num_layers=6)
    assert words[words.index("--num-layers") + 1] == "6"
    assert words[words.index("--tensor-model-parallel-size") + 1] == "2"


def test_a_stock_run_is_recorded_and_its_samples_can_be_split_over_separate_jobs() -> None:
    together = run_pretrain(toy_gpt(), 2, patch="backend-only", probe=_seed_and_vocabulary, before=_announce)
    assert [rank.probe for rank in together] == [(1, 1234, 128)] * 2
    assert all("instrument installed" in rank.stdout for rank in together)
    assert together[0].parameters == together[1].parameters
    assert len(together[0].optimizer[0]) == len(together[0].parameters[0])
    assert [step.iteration for step in together[0].record.steps] == [1, 2, 3, 4]
    assert len(together[0].losses) == len(together[0].grad_norms) == 4
    apart = [
        run_pretrain(
            toy_gpt(global_batch_size=4, train_iters=1),
            1,
            patch="backend-only",
            before=as_worker(worker, 2),
        )[0]
        for worker in range(2)
    ]
    assert apart[0].parameters != apart[1].parameters
    assert together[0].losses[0] == pytest.approx((apart[0].losses[0] + apart[1].losses[0]) / 2, rel=1e-6)


def test_bad_flags_of_a_run_arrive_as_exit_code_and_message() -> None:
    exits = run_failing_pretrain(toy_gpt(no_such_flag=7), 2, patch="backend-only")
    assert [one.exit_code for one in exits] == [2, 2]
    assert "--no-such-flag" in exits[0].stderr


# Guards of the session ----------------------------------------------------------------------------


def _pytest(folder: Path, content: str, *options: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run pytest with the repository's conftest.py on one module in a folder of its own."""
    (folder / "test_module.py").write_text(content)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", os.devnull, "--rootdir", ".", *options, "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


WHERE_MEGATRON_IS = """
import os, subprocess, sys

from tests.support.distributed import run_ranks
from tests.support.megatron_checkout import python_path

PROGRAM = "import megatron.core.package_info as it; print(it.__file__)"


def where():
    import megatron.core

    return megatron.core.__file__


def of_program(**environment):
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True).stdout


def test_all_processes_find_the_checkout():
    import megatron.core.package_info as it

    found = [it.__file__, of_program(), of_program(PYTHONPATH=python_path("/elsewhere")), *run_ranks(where, 1)]
    assert all(path.startswith(os.environ["PYTHONPATH"].partition(os.pathsep)[0]) for path in found), found
    assert not any("site-packages" in path for path in found), found
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkout_wins_over_the_installed_megatron_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    installed = Path(importlib.util.find_spec("megatron.core").submodule_search_locations[0]).parent
    (tmp_path / "checkout" / "megatron").symlink_to(installed)
    (tmp_path / "inner").mkdir()
    result = _pytest(tmp_path / "inner", WHERE_MEGATRON_IS, "--megatron=../checkout", "-n", "1", timeout=840)
    assert result.returncode == pytest.ExitCode.OK, result.stdout
    assert "1 passed" in result.stdout


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "no megatron/core there; give the root of a Megatron-LM checkout"),
        (["megatron/core/package_info.py"], "its data helpers are not compiled; run `make -C "),
    ],
)
def test_a_checkout_that_tests_cannot_run_against_is_refused(tmp_path: Path, files: list[str], said: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    result = _pytest(tmp_path, "def test_nothing():\n    pass\n", f"--megatron={tmp_path}")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--megatron {tmp_path}: {said}" in result.stderr


def test_a_module_without_tests_fails_the_session(tmp_path: Path) -> None:
    result = _pytest(tmp_path, "def check_something():\n    assert True\n")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "collected without any test: test_module.py" in result.stderr


def test_a_process_left_behind_fails_the_session_and_is_ended(tmp_path: Path) -> None:
    content = (
        "import subprocess, pathlib\n"
        "def test_that_forgets_a_daemon():\n"
        "    process = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    pathlib.Path('pid').write_text(str(process.pid))\n"
    )
    result = _pytest(tmp_path, content)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED
    assert "left behind by the tests and killed now" in result.stderr
    assert "sleep 1000" in result.stderr
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_gpu_test_is_skipped_with_a_reason_or_runs(tmp_path: Path) -> None:
    content = (
        "import pytest, torch\n@pytest.mark.gpu\ndef test_on_gpu():\n    assert torch.cuda.is_available()\n"
    )
    result = _pytest(tmp_path, content)
    assert result.returncode == pytest.ExitCode.OK, result.stdout
    assert "1 passed" in result.stdout or "1 skipped" in result.stdout


def start_method():
    import multiprocessing

    return multiprocessing.get_start_method()


def test_a_rank_starts_other_processes_as_one_of_torchrun_does():
    code = "import multiprocessing; print(multiprocessing.get_start_method())"
    default = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert run_ranks(start_method, 1) == [default]
