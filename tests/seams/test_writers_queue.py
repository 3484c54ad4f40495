# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is saved though the process behind its writers' queue has gone, and that process stays small."""

import os
import signal
from functools import partial
from pathlib import Path

from tests.support.presets import toy_gpt
from tests.support.pretrain import run_pretrain
from tests.support.slow_writer import at_step, queue_process


def terminate_all():
    """Send every process of this rank the signal, as torchrun and SLURM do."""
    holder = queue_process()
    os.kill(holder.pid, signal.SIGTERM)
    holder.join(30)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_to_all_processes_leaves_a_checkpoint_after_an_earlier_one(tmp_path):
    saving = {"train_iters": 6, "save": str(tmp_path), "save_interval": 2, "exit_signal_handler": True}
    ranks = run_pretrain(toy_gpt(**saving), 2, before=partial(at_step, 2, terminate_all))
    assert [len(rank.record.steps) for rank in ranks] == [3, 3]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"


def forget_the_queue():
    """Let the run make the queue itself, which here it finds made already."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = None


def libraries_of_the_queues_process(*_):
    """Probe: the libraries that the process behind the writers' queue has loaded."""
    holder = queue_process()
    assert type(holder).__name__ == "SpawnProcess"  # a forked one has what its parent has
    lines = Path(f"/proc/{holder.pid}/maps").read_text().splitlines()
    return sorted({Path(line.split(maxsplit=5)[5]).name for line in lines if line.endswith(".so") or ".so." in line})


def test_the_process_behind_the_queue_imports_no_torch(tmp_path):
    saving = {"train_iters": 2, "save": str(tmp_path), "save_interval": 1}
    forgetful = partial(at_step, 0, forget_the_queue)
    for rank in run_pretrain(toy_gpt(**saving), 2, before=forgetful, probe=libraries_of_the_queues_process):
        assert any(name.startswith("libc.") for name in rank.probe)
        assert not [name for name in rank.probe if "torch" in name]
