# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is saved though the process behind its writers' queue has gone."""

import functools
import os
import signal

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
