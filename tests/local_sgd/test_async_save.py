# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that a process beside each rank writes while workers train on (`--async-save`)."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.local_sgd.runs import arguments, local_run, same_state
from tests.support.pretrain import run_failing_pretrain, run_pretrain
from tests.support.processes import is_running
from tests.support.slow_writer import (
    ASYNC,
    WITH_THE_EXTENSION,
    at_step,
    close_gate,
    end_at_the_first_tensor,
    fill_the_disk,
    give_what_cannot_be_sent,
    hold_writes,
    kill_writer,
    make_the_queue_again,
    needs_the_extension,
    open_gate,
    queue_process,
    start_writers_at_once,
    wait_for_the_writer,
    writer_process,
)
from tests.support.waiting import until
from tests.transport.meter import crossing_calls, install_meter

# Warm-up ends after iteration 2; rounds follow iterations 4, 6, 8, ...
ROUNDS = {"local_sgd_warmup_steps": 2, "local_sgd_sync_interval": 2, "outer_optimizer_lr": 0.5}


def latest(folder: Path) -> str:
    return (folder / "latest_checkpointed_iteration.txt").read_text()


@pytest.mark.parametrize(
    ("layout", "precision", "iteration", "extra"),
    [
        pytest.param("single", "fp32", 5, {"optimizer": "sgd", "lr": 0.1}, id="in mid-interval"),
        pytest.param("dp2", "bf16-distopt", 6, {"local_sgd_cpu_offload": True}, id="at a sync point"),
        pytest.param("single", "fp32", 5, WITH_THE_EXTENSION, id="by the extension", marks=needs_the_extension),
    ],
)
def test_what_is_written_is_what_was_saved(tmp_path, layout, precision, iteration, extra):
    options = {**ROUNDS, **extra, "train_iters": 2 * iteration}
    gate, folder, world = str(tmp_path / "gate"), tmp_path / "saved", 2 if layout == "single" else 4
    saving = {"save": str(folder), "save_interval": iteration}
    run = arguments(layout, precision, workers=2, **saving, **{**ASYNC, **options})
    # Two rounds pass, and all weights, moments and anchors change, before anything is written.
    opening = partial(at_step, 2 * iteration - 1, partial(open_gate, gate))
    through = run_pretrain(run, world, before=(start_writers_at_once, partial(hold_writes, gate), opening))
    resumed = local_run(layout, precision, workers=2, load=str(folder), ckpt_step=iteration, **options)
    assert same_state(resumed, through)
    assert [rank.losses for rank in resumed] == [rank.losses[iteration:] for rank in through]
    assert latest(folder) == str(2 * iteration)
    waited = local_run(layout, precision, workers=2, **options)
    assert same_state(waited, through)


def test_no_step_waits_for_other_workers_while_a_checkpoint_is_written(tmp_path):
    gate = str(tmp_path / "gate")
    options = {"train_iters": 8, "local_sgd_sync_interval": 4, "log_interval": 100, "save_interval": 4}
    run = arguments("single", "bf16", workers=2, save=str(tmp_path / "saved"), **options, **ASYNC)
    opening = partial(at_step, 7, partial(open_gate, gate))
    before = (start_writers_at_once, partial(hold_writes, gate), opening, install_meter)
    for rank in run_pretrain(run, 2, before=before, probe=crossing_calls):
        # Iteration 0 prints a line; 3 and 7 hold a round and a save.
        assert [index for index, calls in enumerate(rank.probe) if calls and index > 0] == [3, 7], rank.probe


def kill_this_rank():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_killed_before_the_checkpoint_is_whole_leaves_the_one_before_and_no_writer(tmp_path):
    gate, folder = str(tmp_path / "gate"), tmp_path / "saved"
    open_gate(gate)
    options = {**ROUNDS, "train_iters": 9, "save_interval": 3, "save": str(folder)}
    before = (
        start_writers_at_once,
        partial(hold_writes, gate),
        # Whoever is past the round after iteration 4 closes the gate for all: the first checkpoint is written by then.
        partial(at_step, 3, wait_for_the_writer),
        partial(at_step, 5, partial(close_gate, gate)),
        partial(at_step, 8, kill_this_rank),
    )
    exits = run_failing_pretrain(arguments("single", "fp32", workers=2, **options, **ASYNC), 2, before=before)
    assert -signal.SIGKILL in [rank.exit_code for rank in exits]
    writers = [int(Path(f"{gate}.{rank}").read_text()) for rank in range(2)]
    until(lambda: not any(map(is_running, writers)), "the writers to end with their ranks", seconds=20)
    assert latest(folder) == "3"
    assert (folder / "iter_0000006").exists()
    resumed = local_run("single", "fp32", workers=2, **{**options, "save": None, "load": str(folder)})
    assert resumed[0].record.steps[0].iteration == 4


QUEUE_OF_A_RANK = """
import multiprocessing, sys, time

from megatron_ext.async_save.seam import ending_with_its_rank

queue = ending_with_its_rank(lambda: multiprocessing.get_context(sys.argv[1]).Manager().Queue())()
print(multiprocessing.active_children()[0].pid, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_process_with_what_writers_report_ends_when_its_rank_is_killed(method):
    rank = subprocess.Popen([sys.executable, "-c", QUEUE_OF_A_RANK, method], stdout=subprocess.PIPE, text=True)
    with rank:
        assert rank.stdout is not None
        process = int(rank.stdout.readline())
        assert is_running(process)
        rank.kill()
    until(lambda: not is_running(process), "the process to end", seconds=20)


def tell_everyone_to_end_twice():
    """Let another process send the processes of this rank the signal, as a batch system does."""
    processes = [writer_process().pid, queue_process().pid, os.getpid()]
    for _ in range(2):
        subprocess.run(["kill", *map(str, processes)], check=True)


def test_a_signal_to_all_processes_while_a_checkpoint_is_written_ends_in_another_one(tmp_path):
    gate, folder = str(tmp_path / "gate"), tmp_path / "saved"
    options = {**ROUNDS, "train_iters": 12, "save_interval": 4, "save": str(folder), "exit_signal_handler": True}
    before = (
        start_writers_at_once,
        partial(hold_writes, gate),
        partial(at_step, 1, make_the_queue_again),
        partial(at_step, 4, tell_everyone_to_end_twice),
        partial(at_step, 5, partial(open_gate, gate)),
    )
    ranks = run_pretrain(arguments("single", "fp32", workers=2, **options, **ASYNC), 2, before=before)
    assert [len(rank.record.steps) for rank in ranks] == [6, 6]
    assert latest(folder) == "6"
    resumed = local_run("single", "fp32", workers=2, **{**options, "save": None, "load": str(folder)})
    assert same_state(resumed, local_run("single", "fp32", workers=2, **{**options, "save": None}))


GONE = "the process that writes checkpoints has ended ("
KILLED = GONE + "signal 9;"


@pytest.mark.parametrize(
    ("before", "said", "written"),
    [
        pytest.param(
            (partial(at_step, 5, wait_for_the_writer), partial(at_step, 6, kill_writer)),
            (KILLED,),
            True,
            id="killed with nothing to write",
        ),
        pytest.param((end_at_the_first_tensor,), (KILLED,), False, id="killed while it takes the tensors"),
        # torch may take the writer along when it clears up after a write that failed, also before its answer is sent.
        pytest.param((fill_the_disk,), ("could not be written (rank 0: ", GONE), False, id="no room"),
    ],
)
def test_a_writer_that_cannot_write_ends_the_run_with_one_error(tmp_path, before, said, written):
    options = {**ROUNDS, "train_iters": 12, "save_interval": 4, "save": str(tmp_path)}
    run = arguments("single", "fp32", workers=2, **options, **ASYNC)
    exits = run_failing_pretrain(run, 2, before=(start_writers_at_once, *before))
    errors = "".join(rank.stderr for rank in exits)
    assert errors.count("megatron-ext: error: --async-save: ") == 1 and any(words in errors for words in said)
    assert f"latest_checkpointed_iteration.txt in --save {tmp_path} names" in errors
    assert "Exception ignored" not in errors
    assert (tmp_path / "latest_checkpointed_iteration.txt").exists() == written


@pytest.mark.parametrize(
    "writing", [ASYNC, pytest.param(WITH_THE_EXTENSION, marks=needs_the_extension)], ids=["own", "extension"]
)
def test_a_writer_killed_while_it_writes_ends_the_run_with_one_error(tmp_path, writing):
    gate = str(tmp_path / "gate")
    options = {**ROUNDS, "train_iters": 8, "save_interval": 4, "save": str(tmp_path / "saved")}
    before = (start_writers_at_once, partial(hold_writes, gate), partial(at_step, 4, kill_writer))
    exits = run_failing_pretrain(arguments("single", "fp32", workers=2, **options, **writing), 2, before=before)
    errors = "".join(rank.stderr for rank in exits)
    assert errors.count("megatron-ext: error: --async-save: ") == 1 and KILLED in errors


def limit_open_files(soft, hard):
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard or resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


FEW = 120  # 86 tensors are saved, and 30 files are open before
SAVING = {"train_iters": 4, "local_sgd_sync_interval": 2, "save_interval": 4}


def test_a_rank_takes_as_many_open_files_as_the_tensors_need(tmp_path):
    run = arguments("single", "fp32", workers=2, save=str(tmp_path), **SAVING, **ASYNC)
    run_pretrain(run, 2, before=(start_writers_at_once, partial(limit_open_files, FEW, None)))
    assert latest(tmp_path) == "4"


def test_a_checkpoint_that_does_not_reach_the_writer_ends_the_run_with_one_error(tmp_path):
    run = arguments("single", "fp32", workers=2, save=str(tmp_path), **SAVING, **ASYNC)
    exits = run_failing_pretrain(run, 2, before=(start_writers_at_once, give_what_cannot_be_sent))
    errors = "".join(rank.stderr for rank in exits)
    assert errors.count("megatron-ext: error: --async-save: a checkpoint did not reach the process") == 1
    assert "ulimit -n) and resume from it" in errors
