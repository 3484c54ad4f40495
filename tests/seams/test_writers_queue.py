# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is saved though the process behind its writers' queue has gone, and that process stays small."""

import functools
import os
import signal
from pathlib import Path

from tests.support.presets import toy_gpt
from tests.support.pretrain import run_pretrain


def terminate_all_at_the_third_step():
    """Send every process of this rank the signal, as torchrun and SLURM do."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import training

    original = training.train_step

    @functools.wraps(original)
    def train_step(*args, **kwargs):
        if kwargs["iteration"] == 2:
            holder = filesystem_async._results_queue._manager._process
            os.kill(holder.pid, signal.SIGTERM)
            holder.join(30)
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    training.train_step = train_step


def test_a_signal_to_all_processes_leaves_a_checkpoint_after_an_earlier_one(tmp_path):
    saving = {"train_iters": 6, "save": str(tmp_path), "save_interval": 2, "exit_signal_handler": True}
    ranks = run_pretrain(toy_gpt(**saving), 2, before=terminate_all_at_the_third_step)
    assert [len(rank.record.steps) for rank in ranks] == [3, 3]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"


def forget_the_queue():
    """Let the run make the queue itself, which here it finds made already."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import training

    original = training.train

    @functools.wraps(original)
    def train(*args, **kwargs):
        filesystem_async._results_queue = None
        return original(*args, **kwargs)

    training.train = train


def libraries_of_the_queues_process(*_):
    """Probe: the libraries that the process behind the writers' queue has loaded."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    holder = filesystem_async._results_queue._manager._process
    assert type(holder).__name__ == "SpawnProcess"  # a forked one has what its parent has
    lines = Path(f"/proc/{holder.pid}/maps").read_text().splitlines()
    return sorted({Path(line.split(maxsplit=5)[5]).name for line in lines if line.endswith(".so") or ".so." in line})


def test_the_process_behind_the_queue_imports_no_torch(tmp_path):
    saving = {"train_iters": 2, "save": str(tmp_path), "save_interval": 1}
    for rank in run_pretrain(toy_gpt(**saving), 2, before=forget_the_queue, probe=libraries_of_the_queues_process):
        assert any(name.startswith("libc.") for name in rank.probe)
        assert not [name for name in rank.probe if "torch" in name]
